"""What the site needs beside Markdown: the repository's address, formulas as MathML, links to sources, tables.

Nothing is fetched when a page is opened, and no formula needs JavaScript.
"""

from __future__ import annotations

import html
import posixpath
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(!?)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```\w+) no-run: .*$", re.MULTILINE)
_MATH = re.compile(
    r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', re.DOTALL
)
_WIDE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
_CELL = re.compile(r"<(t[hd])[^>]*>(.*?)</\1>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
# "67.00 ± 5.24", "62.21 ± 8.82 / 54.5", "18.91 (+13.4 to +16.6)", "<= 0.92", "1.1e+04", "50.6 MB"
_NUMBER = re.compile(
    r"(?:[-+<>=≤≥±/()%,:\s]|to|[kMG]B|m?s|\d(?:[\d.,]*\d)?(?:e[-+]?\d+)?)*"
)
_CLASS = ' class="number"'
_LONG = 24  # characters of a cell that is text: beside two other columns it leaves no place for them on a phone
_EMPTY = {"", "-", "none", "diverges", "NaN"}
_CODE = re.compile(r"(<(?:pre|code|math)\b.*?</(?:pre|code|math)>)", re.DOTALL)
_NAME = re.compile(r"<code>([^\s<]{1,32})</code>")
_GROUP = re.compile(
    r'aria-labelledby="__nav_[\d_]+_label"(?P<rest>[^>]*>\s*<label class="md-nav__title"[^>]*>\s*<span[^>]*></span>\s*)'
    r"(?P<title>[^<]*?)\s*</label>"
)
# | and /, which a browser sets apart as operators
_CLOSE = re.compile(r'<mo(?: stretchy="false")?>(?=&#x000(?:7C|2F);)')
_COPY = '"nav",{class:"md-code__nav"'
_TIED = re.compile(r"(?<=\d) (±) (?=\d)|(?<=\d) (%|ms|s|MB|GB|kB)\b|(?<=\d) (%)")


def on_config(config: Any) -> None:
    """Take the addresses of the repository and of the site from ``[project.urls]``; without them there is no link."""
    project = tomllib.loads(
        (Path(config["docs_dir"]).parent / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    urls = project.get("urls", {})
    config["repo_url"] = urls.get("Repository")
    config["site_url"] = urls.get("Documentation")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Take the tag off fences that are not run, and turn links to source files into links to copies of them."""
    if page.file.src_uri.startswith("reference/"):
        # a guide comes before the interface
        page.meta.setdefault("search", {"boost": 0.05})
    root = Path(config["docs_dir"]).parent
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def link(match: re.Match[str]) -> str:
        image, text, target, _ = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if image or path.startswith("docs/"):
            return match[0]
        if (root / path).is_dir() or path.endswith(".md"):
            return text if text.startswith("`") else f"`{text}`"
        copy = f"source/{path}.txt"
        shown = posixpath.relpath(copy, posixpath.dirname(page.file.src_uri) or ".")
        config.setdefault("source_files", set()).add(
            (root / path, Path(config["site_dir"], copy))
        )
        return f'<a href="{shown}">{html.escape(text.strip("`"))}</a>'

    return _FENCE.sub(r"\1", _LINK.sub(link, markdown))


def on_page_content(content: str, **_: Any) -> str:
    """Write formulas as MathML, keep numbers whole and below each other, and let wide tables scroll in a box.

    The keyboard reaches the box.
    """
    content = _MATH.sub(_mathml, content)
    parts = _CODE.split(content)
    parts[::2] = (
        _TIED.sub(lambda found: found[0].replace(" ", "\u00a0"), text)
        for text in parts[::2]
    )
    # which no line breaks
    parts[::2] = (text.replace(" -&gt; ", " \u2192 ") for text in parts[::2])
    return _WIDE.sub(_table, "".join(parts))


def _table(table: re.Match[str]) -> str:
    """Return a table in its box, named by its head; the columns of numbers have the class ``number``.

    A table with text beside other columns is ``stacked``: on a phone a row is a block, with the columns' names in it.
    """
    rows = [
        [_TAG.sub("", cell).strip() for _, cell in _CELL.findall(row)]
        for row in _ROW.findall(table[0])
    ]
    columns = list(zip(*rows, strict=True))
    numbers = [_is_number(column[1:]) for column in columns]
    long = [max(map(len, map(html.unescape, column))) > _LONG for column in columns]
    stacked = len(columns) > 2 and any(
        text and not number for text, number in zip(long[1:], numbers[1:], strict=True)
    )
    classes = [_CLASS * number for number in numbers]
    labels = [f' data-label="{name}"' * stacked for name in rows[0]]

    def row(found: re.Match[str]) -> str:
        cells = zip(_CELL.findall(found[1]), classes, labels, strict=True)
        made = "".join(
            f"<{tag}{number}{label * (tag == 'td')}>{cell}</{tag}>"
            for (tag, cell), number, label in cells
        )
        return f"<tr>{made.replace('<th></th>', '<td></td>')}</tr>"  # an empty cell is the head of nothing

    head = html.escape(", ".join(filter(None, map(html.unescape, rows[0]))))
    box = "scroll stacked" if stacked else "scroll"
    whole = _NAME.sub(r'<code class="whole">\1</code>', _ROW.sub(row, table[0]))
    return f'<div class="{box}" tabindex="0" role="group" aria-label="{head}">{whole}</div>'


def _is_number(cells: tuple[str, ...]) -> bool:
    told = [html.unescape(cell) for cell in cells if cell not in _EMPTY]
    return bool(told) and all(_NUMBER.fullmatch(cell) for cell in told)


def on_post_page(output: str, **_: Any) -> str:
    """Name the search and the groups of pages for readers who cannot see them: the theme leaves some without a name."""
    output = output.replace(
        'data-md-component="search" role="dialog"',
        'data-md-component="search" role="dialog" aria-label="Search"',
    )
    return _GROUP.sub(
        lambda group: (
            f'aria-label="Pages: {group["title"]}"{group["rest"]}{group["title"]}</label>'
        ),
        output,
    )


def on_post_build(config: Any) -> None:
    """Copy the source files that pages link to, and make the theme's copy button a button, in place of a navigation."""
    for source, copy in config.get("source_files", ()):
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    (bundle,) = Path(config["site_dir"], "assets/javascripts").glob("bundle.*.min.js")
    code = bundle.read_text(encoding="utf-8")
    if code.count(_COPY) != 1:
        raise ValueError(
            f"{bundle.name} has {code.count(_COPY)} times {_COPY}, not once: look at the theme's version"
        )
    bundle.write_text(
        code.replace(_COPY, _COPY.replace("nav", "div", 1)), encoding="utf-8"
    )


def _mathml(match: re.Match[str]) -> str:
    # the site's own dependency: the rest is tested without it
    from latex2mathml.converter import (
        convert,
    )

    latex = " ".join(html.unescape(match[3]).split())
    if match[1] == "span":
        return _CLOSE.sub(
            '<mo stretchy="false" lspace="0.1em" rspace="0.1em">',
            convert(latex, display="inline"),
        )
    # A row of formulas breaks between them on a phone.
    formulas = "".join(
        convert(one.strip(), display="block") for one in latex.split(r"\qquad")
    )
    return f'<div class="formula" tabindex="0">{formulas}</div>'

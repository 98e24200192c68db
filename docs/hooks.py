"""What the site needs beside Markdown: the repository's address, formulas as MathML, links to sources, wide tables.

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

from latex2mathml.converter import convert

_LINK = re.compile(r"(!?)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```\w+) no-run: .*$", re.MULTILINE)
_MATH = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', re.DOTALL)
_WIDE = re.compile(r"<table>.*?</table>", re.DOTALL)


def on_config(config: Any) -> None:
    """Take the addresses of the repository and of the site from ``[project.urls]``; without them there is no link."""
    project = tomllib.loads((Path(config["docs_dir"]).parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = project.get("urls", {})
    config["repo_url"] = urls.get("Repository")
    config["site_url"] = urls.get("Documentation")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Take the tag off fences that are not run, and turn links to source files into links to copies of them."""
    if page.file.src_uri.startswith("reference/"):
        page.meta.setdefault("search", {"boost": 0.05})  # a guide comes before the interface
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
        config.setdefault("source_files", set()).add((root / path, Path(config["site_dir"], copy)))
        return f'<a href="{shown}">{html.escape(text.strip("`"))}</a>'

    return _FENCE.sub(r"\1", _LINK.sub(link, markdown))


def on_page_content(content: str, **_: Any) -> str:
    """Write formulas as MathML, and let wide tables scroll in a box that the keyboard reaches."""
    content = _MATH.sub(_mathml, content)
    return _WIDE.sub(lambda table: f'<div class="scroll" tabindex="0" role="region">{table[0]}</div>', content)


def on_post_build(config: Any) -> None:
    """Copy the source files that pages link to."""
    for source, copy in config.get("source_files", ()):
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)


def _mathml(match: re.Match[str]) -> str:
    latex = " ".join(html.unescape(match[3]).split())
    formula = convert(latex, display="block" if match[1] == "div" else "inline")
    return f'<div class="formula" tabindex="0">{formula}</div>' if match[1] == "div" else formula

"""The HTML of a report: sections of text, tables and figures in one file that loads nothing.

Sections hold plain text. This module alone writes HTML, and it escapes every text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

__all__ = [
    "Block",
    "Code",
    "Facts",
    "Figure",
    "Heading",
    "Link",
    "Listing",
    "More",
    "Page",
    "Section",
    "Switch",
    "Table",
    "Text",
]


@dataclass(frozen=True)
class Text:
    """A paragraph; ``kind`` is "", "lead", "note" or "warning"."""

    text: str
    kind: str = ""

    def html(self) -> str:
        """Return the paragraph."""
        mark = "<strong>Warning.</strong> " if self.kind == "warning" else ""
        return f'<p class="{self.kind}">{mark}{escape(self.text)}</p>' if self.kind else f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Heading:
    """A heading below that of the section."""

    text: str

    def html(self) -> str:
        """Return the heading."""
        return f"<h3>{escape(self.text)}</h3>"


@dataclass(frozen=True)
class Link:
    """A cell that leads to a section of the same page."""

    text: str
    anchor: str


Cell = str | Link


@dataclass(frozen=True)
class Table:
    """A table; a column is aligned to the right if all its cells are numbers, with signs, units and deviations."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def html(self) -> str:
        """Return the table in a box of its own, in which a wide table scrolls."""
        numeric = [_is_number(text) for text in zip(*self.rows, strict=True)] or [False] * len(self.head)
        marks = [' class="n"' if number else "" for number in numeric]
        caption = f'<p class="note caption">{escape(self.caption)}</p>' if self.caption else ""
        head = "".join(f'<th scope="col"{m}>{escape(name)}</th>' for m, name in zip(marks, self.head, strict=True))
        body = "".join(
            "<tr>" + "".join(f"<td{m}>{_cell(cell)}</td>" for m, cell in zip(marks, row, strict=True)) + "</tr>"
            for row in self.rows
        )
        label = escape(self.caption or ", ".join(name for name in self.head if name))
        return (
            f'{caption}<div class="wide" tabindex="0" role="region" aria-label="{label}"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )


@dataclass(frozen=True)
class Facts:
    """Pairs of a name and a value, the most important numbers first."""

    pairs: Sequence[tuple[str, str]]

    def html(self) -> str:
        """Return a list of terms."""
        pairs = "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in self.pairs)
        return f'<dl class="facts">{pairs}</dl>'


@dataclass(frozen=True)
class Listing:
    """A list of sentences."""

    items: Sequence[str]

    def html(self) -> str:
        """Return the list."""
        return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in self.items) + "</ul>"


@dataclass(frozen=True)
class Code:
    """A command or a file."""

    text: str

    def html(self) -> str:
        """Return the text as it is."""
        return f'<pre tabindex="0"><code>{escape(self.text)}</code></pre>'


@dataclass(frozen=True)
class Switch:
    """The choice of what the curves are drawn over: pairs of a unit and its name."""

    units: Sequence[tuple[str, str]]

    def html(self) -> str:
        """Return radio buttons, the first one chosen; ``report.js`` listens to them."""
        buttons = "".join(
            f'<label><input type="radio" name="unit" value="{escape(unit)}"{" checked" * (at == 0)}> '
            f"{escape(name)}</label>"
            for at, (unit, name) in enumerate(self.units)
        )
        return f'<fieldset class="switch"><legend>Draw over</legend>{buttons}</fieldset>'


@dataclass(frozen=True)
class Figure:
    """A figure of plotly, its description for readers who cannot see it, and its numbers.

    Attributes:
        drawing: ``data`` and ``layout`` of plotly, and what ``report.js`` needs; see ``figures``. A ``note`` stands
            below it.
        label: what the figure shows, in one sentence.
        title: the text above it.
        numbers: its numbers as a table.
    """

    drawing: dict[str, Any]
    label: str
    title: str = ""
    numbers: Table | None = None

    def html(self) -> str:
        """Return the figure; ``report.js`` draws it."""
        content = json.dumps(self.drawing, separators=(",", ":"), allow_nan=False)
        content = content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        title = f"<figcaption>{escape(self.title)}</figcaption>" if self.title else ""
        note = Text(self.drawing["note"], "note").html() if "note" in self.drawing else ""
        numbers = More("Numbers of this figure", [self.numbers]).html() if self.numbers else ""
        return (
            f'<figure>{title}<div class="plot" role="img" aria-label="{escape(self.label)}"></div>'
            f'<script type="application/json">{content}</script>{note}{numbers}</figure>'
        )


@dataclass(frozen=True)
class More:
    """Blocks that the reader opens; with an ``anchor`` they are linked to, and are open on paper."""

    summary: str
    blocks: Sequence[Block]
    anchor: str = ""

    def html(self) -> str:
        """Return the blocks below their summary."""
        inside = "".join(block.html() for block in self.blocks)
        name = f' id="{escape(self.anchor)}"' if self.anchor else ""
        return f"<details{name}><summary>{escape(self.summary)}</summary>{inside}</details>"


Block = Text | Heading | Table | Facts | Listing | Code | Switch | Figure | More


@dataclass(frozen=True)
class Section:
    """A part of the page, with its own entry in the contents."""

    anchor: str
    title: str
    blocks: Sequence[Block]

    def html(self) -> str:
        """Return the section."""
        inside = "\n".join(block.html() for block in self.blocks)
        return f'<section id="{escape(self.anchor)}"><h2>{escape(self.title)}</h2>\n{inside}\n</section>'


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        title: the heading.
        above: a few words above the heading: what kind of report this is.
        lead: blocks before the first section.
        sections: the sections.
        foot: the last line.
        live: seconds after which an open page is loaded again; 0 = never.
    """

    title: str
    above: str
    lead: Sequence[Block]
    sections: Sequence[Section]
    foot: str
    live: int = 0

    def html(self) -> str:
        """Return the whole file, plotly's code included."""
        from plotly.offline import get_plotlyjs

        here = files(__package__)
        contents = "".join(f'<li><a href="#{escape(s.anchor)}">{escape(s.title)}</a></li>' for s in self.sections)
        refresh = f'<meta http-equiv="refresh" content="{self.live}">' if self.live else ""
        drawn = any(isinstance(block, Figure) for section in self.sections for block in _all(section.blocks))
        plotly = f"<script>{get_plotlyjs()}</script>" if drawn else ""
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{GENERATOR}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<noscript>{refresh}</noscript>
<title>{escape(self.title)}</title>
<style>{(here / "report.css").read_text(encoding="utf-8")}</style>
</head>
<body data-live="{self.live}">
<header>
<p class="above">{escape(self.above)}</p>
<h1>{escape(self.title)}</h1>
{"".join(block.html() for block in self.lead)}
<nav aria-label="Contents"><ul>{contents}</ul></nav>
</header>
<noscript><p class="note">The figures need JavaScript. Their numbers are in the tables below them.</p></noscript>
<main>
{"".join(section.html() for section in self.sections)}
</main>
<footer><p>{escape(self.foot)}</p></footer>
{plotly}
<script>{(here / "report.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


GENERATOR = '<meta name="generator" content="fedbn-flwr report">'


def _all(blocks: Sequence[Block]) -> list[Block]:
    return [
        inner for block in blocks for inner in ([block, *_all(block.blocks)] if isinstance(block, More) else [block])
    ]


def _cell(cell: Cell) -> str:
    return f'<a href="#{escape(cell.anchor)}">{escape(cell.text)}</a>' if isinstance(cell, Link) else escape(cell)


def _is_number(column: Sequence[Cell]) -> bool:
    """Return whether a column has numbers, and else only cells without a value."""
    shown = [cell for cell in column if cell not in ("", "-")]
    return bool(shown) and all(isinstance(cell, str) and _NUMBER.fullmatch(cell) for cell in shown)


_NUMBER = re.compile(r"[+-]?[\d,]+(\.\d+)?(e[+-]\d+)?( (%|s|B|[KMG]iB))?( ± [\d.]+)?")

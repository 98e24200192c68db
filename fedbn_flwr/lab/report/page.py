"""What a report consists of: sections of text, tables and figures, in one HTML file that loads nothing.

These blocks hold plain text. The templates make HTML of them, and escape every text.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

__all__ = [
    "GENERATOR",
    "Block",
    "Cell",
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

GENERATOR = '<meta name="generator" content="fedbn-flwr report">'
"""The line by which a file is known as a report."""

PLOTLY = Path(__file__).with_name("plotly-cartesian.min.js.gz")
"""plotly.js 4.1.1, its bundle of cartesian plots, as published (MIT licence; see its first lines): ``gzip -9 -n``."""

_NUMBER = re.compile(r"[+-]?[\d,]+(\.\d+)?(e[+-]\d+)?( (%|s|B|[KMG]iB))?( ± [\d.]+)?")
_HERE = Path(__file__).parent
_TEMPLATES = Environment(
    loader=FileSystemLoader(_HERE / "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}


class Block:
    """A part of a page."""

    def __html__(self) -> str:
        """Return the HTML, by the macro of the class's name; Jinja2 calls this method for ``{{ block }}``."""
        macros = _TEMPLATES.get_template("blocks.html.jinja").module
        return str(getattr(macros, type(self).__name__)(self))


@dataclass(frozen=True)
class Text(Block):
    """A paragraph; ``kind`` is "", "lead", "note" or "warning"."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Heading(Block):
    """A heading below that of the section."""

    text: str


@dataclass(frozen=True)
class Link(Block):
    """A cell that leads to a section of the same page."""

    text: str
    anchor: str


Cell = str | Link


@dataclass(frozen=True)
class Table(Block):
    """A table, in a box in which a wide one scrolls."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    @property
    def label(self) -> str:
        """What it shows, for readers who cannot see it."""
        return self.caption or ", ".join(name for name in self.head if name)

    @property
    def stacked(self) -> bool:
        """Whether a row is a block on a phone, with the names of the columns in it: few rows of many columns."""
        return len(self.head) > 4 and len(self.rows) <= 12

    @property
    def numeric(self) -> list[bool]:
        """Whether all cells of a column with a value are numbers, with signs, units and deviations, by column."""
        return [_is_number(column) for column in zip(*self.rows, strict=True)] or [False] * len(self.head)


@dataclass(frozen=True)
class Facts(Block):
    """Pairs of a name and a value, the most important numbers first."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Listing(Block):
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Code(Block):
    """A command or a file."""

    text: str


@dataclass(frozen=True)
class Switch(Block):
    """The choice of what the curves are drawn over: pairs of a unit and its name, the first one chosen."""

    units: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Figure(Block):
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


@dataclass(frozen=True)
class More(Block):
    """Blocks that the reader opens; with an ``anchor`` they are linked to, and are open on paper."""

    summary: str
    blocks: Sequence[Block]
    anchor: str = ""


@dataclass(frozen=True)
class Section(Block):
    """A part of the page, with its own entry in the contents."""

    anchor: str
    title: str
    blocks: Sequence[Block]


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

    def html(self, plain: bool = False) -> str:
        """Return the whole file; with a figure, plotly's code is in it, compressed unless ``plain``."""
        has_figures = any(isinstance(block, Figure) for section in self.sections for block in section.blocks)
        return _TEMPLATES.get_template("page.html.jinja").render(
            page=self,
            generator=GENERATOR,
            style=(_HERE / "report.css").read_text(encoding="utf-8"),
            script=(_HERE / "report.js").read_text(encoding="utf-8"),
            plotly=base64.b64encode(PLOTLY.read_bytes()).decode() if has_figures and not plain else "",
            plain_plotly=gzip.decompress(PLOTLY.read_bytes()).decode() if has_figures and plain else "",
        )


def _is_number(column: Sequence[Cell]) -> bool:
    """Return whether a column has numbers, and else only cells without a value."""
    shown = [cell for cell in column if cell not in ("", "-")]
    return bool(shown) and all(isinstance(cell, str) and _NUMBER.fullmatch(cell) for cell in shown)

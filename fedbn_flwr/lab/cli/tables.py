"""Tables of a study in the terminal: aligned, a table for each test, a heading only above a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from fedbn_flwr.lab.cli.console import say

if TYPE_CHECKING:
    from fedbn_flwr.lab.studies.rows import Page

__all__ = ["show_pages"]

_NUMBER = re.compile(r"[-+]?[\d,.]+(e[-+]\d+)?( ± [\d.]+)?( \*{1,2})?|[-+][\d.]+ to [-+][\d.]+|-|")
_SPLIT, _METRIC = "split", "metric"


def show_pages(pages: Iterable[Page]) -> None:
    """Print the tables and paragraphs of pages."""
    for page in pages:
        for part in page.parts:
            say()
            if isinstance(part, str):
                say(part)
                continue
            for number, (title, head, body) in enumerate(_by_test(list(part.head), list(map(list, part.rows)))):
                if number:
                    say()
                say(", ".join(filter(None, (page.title, title))), style="bold")
                say(_aligned(head, body))


def _by_test(head: list[str], rows: list[list[str]]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield a title and a table for each test; a split that is the only one has no column."""
    if head.count(_METRIC) != 1 or len({row[head.index(_METRIC)] for row in rows}) < 2:
        yield "", *_without(_SPLIT, head, rows)
        return
    at = head.index(_METRIC)
    for metric in dict.fromkeys(row[at] for row in rows):
        of_test = [[cell for i, cell in enumerate(row) if i != at] for row in rows if row[at] == metric]
        yield metric, *_without(_SPLIT, [name for name in head if name != _METRIC], of_test)


def _without(name: str, head: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the table without the column of this name if all its cells are alike."""
    at = head.index(name) if name in head else None
    if at is None or len({row[at] for row in rows}) > 1:
        return head, rows
    return head[:at] + head[at + 1 :], [row[:at] + row[at + 1 :] for row in rows]


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, cells in zip(head, zip(*rows, strict=True), strict=True):
        right = all(_NUMBER.fullmatch(cell) for cell in cells)
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table

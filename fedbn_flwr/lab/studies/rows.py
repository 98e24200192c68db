"""Rows of tables: grouped, as pages of text, and their numbers with a spread, ours and those of a paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from fedbn_flwr.training.tasks import in_percent

__all__ = [
    "AVERAGE",
    "WHOLE",
    "Grid",
    "Page",
    "Pages",
    "PaperNumber",
    "grouped",
    "markdown_table",
    "mean_std",
    "scale_of",
    "with_std",
]

AVERAGE = "average"  # of the domains
_BAR = "\\|"
WHOLE = ""  # in a paper's numbers by domain the key of one that is not by domain


class PaperNumber(NamedTuple):
    """A number of a paper, in the unit of the table, with its ± where the paper has one."""

    mean: float | None = None  # None: the paper has none
    std: float | None = None

    @classmethod
    def read(cls, value: Any) -> PaperNumber:
        """Read a number of a study file, such as 53.97 or "53.97 ± 4.18".

        Raises:
            ValueError: it is neither.
        """
        try:
            if isinstance(value, bool):
                raise TypeError
            number = cls(*map(float, value.split("±"))) if isinstance(value, str) else cls(float(value))
        except (TypeError, ValueError):  # also more than one ±
            number = cls(math.nan)
        if not all(math.isfinite(part) for part in number if part is not None) or (number.std or 0) < 0:
            raise ValueError(f"'{value}' is no number of a paper; write 53.97 or 53.97 ± 4.18")
        return number


def scale_of(metric: str) -> int:
    """Return by what tables multiply a metric: shares are in percent."""
    return 100 if in_percent(metric) else 1


def mean_std(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Return mean and sample standard deviation of the values that are known; None for too few of them."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None, statistics.stdev(known) if len(known) > 1 else None


def with_std(mean: float | None, std: float | None, form: str, missing: str = "-") -> str:
    """Return "mean ± std", or the mean alone, each in the format; ``missing`` without a mean."""
    if mean is None:
        return missing
    return f"{mean:{form}}" + ("" if std is None else f" ± {std:{form}}")


Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by their key, in the order in which the keys come first."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


class Grid(NamedTuple):
    """A table of texts; as a string it is Markdown."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, head: Iterable[object], rows: Iterable[Iterable[object]]) -> Grid:
        """Return a table of anything, whose cells have one line each."""
        return cls(_texts(head), tuple(map(_texts, rows)))

    def __str__(self) -> str:
        """Markdown, in which asterisks are no emphasis."""
        head, *rows = [[cell.replace("*", "\\*") for cell in row] for row in (self.head, *self.rows)]
        return markdown_table(head, rows)


def _texts(cells: Iterable[object]) -> tuple[str, ...]:
    return tuple(str(cell).replace("\n", " ") for cell in cells)


def markdown_table(head: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown, whose cells may have markup; a cell's own bars and line ends do not end it."""
    lines = [f"| {' | '.join(text.replace('|', _BAR) for text in _texts(cells))} |" for cells in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


class Page(NamedTuple):
    """A heading and what stands below it; as a string it is Markdown.

    Attributes:
        title: of the heading.
        parts: tables and paragraphs.
        level: of the heading, 1 for the highest.
    """

    title: str
    parts: tuple[Grid | str, ...]
    level: int = 1

    def __str__(self) -> str:
        """Markdown."""
        return "\n\n".join([f"{'#' * self.level} {self.title}", *map(str, self.parts)]) + "\n"


class Pages(tuple[Page, ...]):
    """Pages in order; as a string they are Markdown."""

    def __str__(self) -> str:
        """Markdown."""
        return "\n".join(map(str, self))

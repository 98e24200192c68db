"""Rows of tables: grouped, as text in Markdown, and their numbers with a spread, ours and those of a paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from fedbn_flwr.training.tasks import in_percent

__all__ = [
    "AVERAGE",
    "WHOLE",
    "PaperNumber",
    "grouped",
    "markdown_table",
    "mean_std",
    "scale_of",
    "with_std",
]

AVERAGE = "average"  # of the domains
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


def markdown_table(head: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown; a cell's own bars and line ends do not end it."""
    lines = []
    for cells in (head, *rows):
        texts = [" ".join(str(cell).replace("|", "\\|").split("\n")) for cell in cells]
        lines.append(f"| {' | '.join(texts)} |")
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)

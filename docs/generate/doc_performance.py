"""The tables of the simulation, from ``docs/performance.yaml``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

__all__ = ["BARE", "between", "compared", "compared_sentence", "simulation_tables"]

BARE = "bare torch loop"
_FIGURES = ("seconds", "cpu-seconds", "memory", "accuracy")
_SHORT = {
    "fedbn-flwr, in the process": "in process",
    "fedbn-flwr, ": "",
    " loop": "",
    "Flower's own strategy and client": "Flower's own",
}
Data = Mapping[str, Any]
Range = tuple[float, float]


def simulation_tables(root: Path) -> str:
    """Return the table of ratios with their targets, the settings and their runs."""
    data = _data(root)
    head = ["ratio", "of seconds", "of memory", "target of the seconds"]
    rows = []
    for setting, name, against, ranges, target in ratios(data):
        cells = [between(ranges[key]) for key in ("seconds", "memory")]
        rows.append([f"{setting}: {_short(name)} / {_short(against)}", *cells, target])
    titles: list[str] = []
    machines: dict[str, None] = {}
    for name, one in data["settings"].items():
        commit, _, machine = one["runs"][-1]["note"].partition("; ")
        titles.append(f"- {name}: {one['title']}. {commit}.")
        machines[f"{machine.partition('. ')[0]}."] = None
    return "\n\n".join([_table(head, rows), "\n".join(titles), *machines])


def compared_sentence(root: Path) -> str:
    """Return how many of the ratios of seconds are below 0.95 and above 1.05 in every
    run, and the range of all.
    """
    found = [ranges["seconds"] for *_, ranges, _ in compared(_data(root))]
    faster = sum(high < 0.95 for _, high in found)
    level = sum(low >= 0.95 and high <= 1.05 for low, high in found)
    slower = sum(low > 1.05 for low, _ in found)
    return (
        f"**A round takes {min(low for low, _ in found):.2f} to"
        f" {max(high for _, high in found):.2f} times the seconds of the"
        f" loop or package that it is compared with: in {len(found)} comparisons it is"
        f" faster in {faster}, level in {level} and slower in {slower} in every run; in"
        f" {len(found) - faster - level - slower} the runs differ.**"
    )


def compared(
    data: Data,
) -> Iterator[tuple[str, str, str, Mapping[str, Range], str]]:
    """Yield the ``ratios`` to a loop or another package, without those to a row of this
    package.
    """
    for ratio in ratios(data):
        if not ratio[2].startswith("fedbn-flwr"):
            yield ratio


def ratios(
    data: Data,
) -> Iterator[tuple[str, str, str, Mapping[str, Range], str]]:
    """Yield setting, row, the row that it is divided by, the range of each figure's
    ratio over the runs, and the target.
    """
    for setting, one in data["settings"].items():
        for name, against, target in one["ratios"]:
            both = [
                run["rows"]
                for run in one["runs"]
                if {name, against} <= run["rows"].keys()
            ]
            if both:
                ranges = {key: _range(both, name, against, key) for key in _FIGURES}
                yield setting, name, against, ranges, target


def between(values: Range) -> str:
    """Return a range as text; "-" where nothing was measured."""
    low, high = values
    if math.isnan(low):
        return "-"
    ends = dict.fromkeys((f"{low:.2f}", f"{high:.2f}"))
    return " to ".join(ends)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(contender: str) -> str:
    """Return the name of a contender as the table shows it."""
    for text, short in _SHORT.items():
        contender = contender.replace(text, short)
    return contender


def _data(root: Path) -> Data:
    return _read((root / "docs/performance.yaml").read_text(encoding="utf-8"))


@functools.cache  # to read so long a file takes a second
def _read(text: str) -> Data:
    found: Data = yaml.safe_load(text)
    return found


def _range(runs: Sequence[Data], name: str, against: str, key: str) -> Range:
    """Return the smallest and the largest ratio of a figure; NaN where a run has none."""
    found = [_ratio(rows, name, against, key) for rows in runs]
    return min(found), max(found)


def _ratio(rows: Data, name: str, against: str, key: str) -> float:
    mine, theirs = rows[name][key], rows[against][key]
    return math.nan if mine is None or theirs is None else mine / theirs

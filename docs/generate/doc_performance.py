"""The tables of the simulation, from ``docs/performance.yaml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

__all__ = ["BARE", "compared_sentence", "ratios", "simulation_tables"]

BARE = "bare torch loop"
_FIGURES = ("seconds", "cpu-seconds", "memory", "accuracy")
Data = Mapping[str, Any]


def simulation_tables(root: Path) -> str:
    """Return the table of ratios with their targets, and a table for each setting with
    other packages.
    """
    data = _data(root)
    head = ["ratio", "of seconds", "of CPU seconds", "target of the seconds"]
    rows = [
        [f"{setting}: {name} / {against}", number(seconds), number(cpu_seconds), target]
        for setting, name, against, seconds, cpu_seconds, target in ratios(data)
    ]
    tables = [_table(head, rows)]
    for setting in data["settings"].values():
        if any(not name.startswith((BARE, "fedbn-flwr")) for name in setting["rows"]):
            tables.append(_setting(setting))
    return "\n\n".join(tables)


def compared_sentence(root: Path) -> str:
    """Return how many of the ratios of seconds are below 0.95 and above 1.05, and the
    range of all.
    """
    found = [
        seconds for _, _, _, seconds, _, _ in ratios(_data(root)) if seconds is not None
    ]
    faster, slower = sum(one < 0.95 for one in found), sum(one > 1.05 for one in found)
    return (
        f"**A round takes {min(found):.2f} to {max(found):.2f} times the seconds of the"
        f" loop or package that it is compared with: in {len(found)} comparisons it is"
        f" faster in {faster}, slower in {slower}, and level in"
        f" {len(found) - faster - slower}.**"
    )


def ratios(
    data: Data,
) -> Iterator[tuple[str, str, str, float | None, float | None, str]]:
    """Yield setting, row, the row that it is divided by, the ratios of seconds and CPU
    seconds, and the target.
    """
    for setting, one in data["settings"].items():
        for name, against, target in one["ratios"]:
            if {name, against} <= one["rows"].keys():
                yield (
                    *(setting, name, against),
                    *(
                        _ratio(one, name, against, key)
                        for key in ("seconds", "cpu-seconds")
                    ),
                    target,
                )


def number(value: float | None) -> str:
    """Return a number with three significant digits, without an exponent; "-" for None."""
    if value is None:
        return "-"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, 3 - whole)}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _data(root: Path) -> Data:
    found: Data = yaml.safe_load(
        (root / "docs/performance.yaml").read_text(encoding="utf-8")
    )
    return found


def _ratio(setting: Data, name: str, against: str, key: str) -> float | None:
    mine, theirs = (setting["rows"].get(row, {}).get(key) for row in (name, against))
    return None if mine is None or theirs is None else mine / theirs


def _setting(one: Data) -> str:
    rows = []
    for name, row in one["rows"].items():
        seconds, *others = (number(row[key]) for key in _FIGURES)
        rows.append(
            [
                name,
                row["version"],
                seconds,
                number(_ratio(one, name, BARE, "seconds")),
                *others,
            ]
        )
    head = ["", "version", "seconds a round", "/ bare", "CPU seconds", "MB", "accuracy"]
    missing = "".join(
        f"\n\nMissing: {name}: {reason}." for name, reason in one["missing"].items()
    )
    return f"**{one['title']}**\n\n{_table(head, rows)}{missing}\n\n{one['note']}"

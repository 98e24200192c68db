"""The table by site on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fedbn_flwr.lab.cli.console import say

__all__ = ["print_sites"]

_FIGURES = ("value", "low", "high", "difference", "difference-low", "difference-high")


def print_sites(rows: Sequence[Mapping[str, Any]], metric: str) -> None:
    """Print a row for each site: its counts, the metric, and the ends of intervals
    where the rows have them.
    """
    names = [name for name in ("examples", "groups", *_FIGURES) if name in rows[0]]
    table = Table(
        "site", *(metric if name == "value" else name for name in names), box=None
    )
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        site = f"{row['site']} (never trained)" if row.get("held-out") else row["site"]
        table.add_row(site, *(_shown(row[name]) for name in names))
    say(table)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"

"""The table by site on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fedbn_flwr.lab.cli.console import say
from fedbn_flwr.lab.files import site_label

_FIGURES = ("value", "low", "high", "difference", "difference-low", "difference-high")


def print_sites(rows: Sequence[Mapping[str, Any]], metric: str) -> None:
    """Print a row for each site with its counts and its metric.

    Intervals and errors are included if there are any.
    """
    columns = ["examples", "groups", *_FIGURES, "error"]
    # A site without a name is called "client N", so only named sites need a column with
    # the numbers.
    if any(row["site"] != f"client {row.get('client', '-')}" for row in rows):
        columns.insert(0, "client")
    names = [name for name in columns if any(name in row for row in rows)]
    table = Table("site", box=None)
    for name in names:
        table.add_column(metric if name == "value" else name)
    # Fold a long name over several lines instead of cutting it.
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(site_label(row), *(_shown(row.get(name)) for name in names))
    say(table)


def _shown(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | str):
        return str(value)
    return f"{value:.4f}"

"""The table by site on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.lab.cli.console import say_table
from fedbn_flwr.lab.results.files import site_label

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
    say_table(
        ["site", *(metric if name == "value" else name for name in names)],
        ([site_label(row), *(_shown(row.get(name)) for name in names)] for row in rows),
    )


def _shown(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | str):
        return str(value)
    return f"{value:.4f}"

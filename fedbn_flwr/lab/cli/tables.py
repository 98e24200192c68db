"""The table of a study in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from fedbn_flwr.lab.cli.console import say

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["show_table"]

_TEXT = ("split", "method", "metric", "domain", "runs")


def show_table(shown: pd.DataFrame, title: str) -> None:
    """Print a table of text, aligned; a split that is the only one has no column."""
    if "split" in shown and shown["split"].nunique() == 1:
        shown = shown.drop(columns="split")
    table = Table(box=None, pad_edge=False)
    for name in shown.columns:
        table.add_column(name, justify="left" if name in _TEXT else "right", overflow="fold")
    for row in shown.to_numpy().tolist():
        table.add_row(*row)
    say()
    say(title, style="bold")
    say(table)

"""The table by site on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from fedbn_flwr.lab.cli.console import say
from fedbn_flwr.lab.sites.table import columns, decisions, sentences

__all__ = ["print_sites"]


def print_sites(sites: Mapping[str, Any]) -> None:
    """Print the table and what it says."""
    head, rows = columns(sites)
    table = Table(*head, box=None)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*row)
    say(table)
    for site, decision, what_next in decisions(sites):
        say(f"{site}: {decision}. {what_next.capitalize()}.")
    for sentence in sentences(sites):
        say(sentence)

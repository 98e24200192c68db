"""The section of a report by site: intervals, decisions, what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbn_flwr.lab.report.page import Block, Heading, Section, Table, Text
from fedbn_flwr.lab.report.shown import with_unit_of
from fedbn_flwr.lab.sites.table import columns, decisions, sentences

__all__ = ["sites_section"]

_MOST = 200  # rows of the page; summary.json has all


def sites_section(tables: Mapping[str, Mapping[str, Any]]) -> Section | None:
    """Return the section of one or more tables by site, each with a title; None without any."""
    blocks: list[Block] = []
    for title, table in tables.items():
        head, rows = columns(table, _MOST)
        if title:
            blocks.append(Heading(title))
        blocks.append(
            Table(head, rows, f"{with_unit_of(table['metric'])} at each site, {table['level']:.0%} intervals")
        )
        if decided := decisions(table, _MOST):
            blocks.append(Table(["site", "decision", "what to do next"], decided))
        blocks += [Text(sentence, "note") for sentence in sentences(table, _MOST)]
    return Section("sites", "Is it better at my site?", blocks) if blocks else None

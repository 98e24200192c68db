"""Intervals that nodes compute and send: how many groups a site has, and the ends of the interval; no example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fedbn_flwr.lab.sites.intervals import Estimate
from fedbn_flwr.lab.sites.measured import SiteData, measure
from fedbn_flwr.lab.sites.table import EXAMPLES, table_of_estimates
from fedbn_flwr.messages.protocol import GROUPS_NEEDED, INTERVAL_GROUPS, INTERVAL_HIGH, INTERVAL_LOW, NUM_EXAMPLES
from fedbn_flwr.training.tasks import Task

__all__ = ["interval_metrics", "table_of_replies"]

_NOT_SENT, _NONE = "the node does not report it (report-intervals)", "the node can give no interval"


def interval_metrics(model: nn.Module, data: SiteData, task: Task) -> dict[str, float]:
    """Return what a node adds to the metrics of its test: the groups, and the interval or how many groups it needs."""
    measured = measure(model, data, task)
    found = measured.estimate()
    metrics: dict[str, float] = {INTERVAL_GROUPS: measured.num_groups}
    if found.low is not None and found.high is not None:
        metrics |= {INTERVAL_LOW: found.low, INTERVAL_HIGH: found.high}
    elif found.needed:
        metrics[GROUPS_NEEDED] = found.needed
    return metrics


def table_of_replies(clients: Mapping[str, Mapping[str, Any]], task: Task, unit: str) -> dict[str, Any] | None:
    """Return the table by site of the clients' tests in a line of ``metrics.jsonl``; None if no node sends intervals.

    Args:
        clients: the metrics of each client, with the prefix ``own-``.
        task: the learning task.
        unit: what a group is called.
    """
    if not any(f"own-{INTERVAL_GROUPS}" in metrics for metrics in clients.values()):
        return None
    rows = []
    for client, metrics in clients.items():
        value, examples = metrics.get(f"own-{task.score}"), int(metrics.get(f"own-{NUM_EXAMPLES}", 0))
        low, high = metrics.get(f"own-{INTERVAL_LOW}"), metrics.get(f"own-{INTERVAL_HIGH}")
        needed, groups = metrics.get(f"own-{GROUPS_NEEDED}"), metrics.get(f"own-{INTERVAL_GROUPS}")
        reason = "" if low is not None else _NOT_SENT if groups is None else _NONE
        if groups is None and unit == EXAMPLES:
            groups = examples
        found = Estimate(None if value != value else value, low, high, reason, int(needed) if needed else None)
        rows.append((f"client {client}", examples, None if groups is None else int(groups), found))
    return table_of_estimates(task.score, rows, unit)

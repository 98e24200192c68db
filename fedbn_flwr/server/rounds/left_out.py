"""Metrics of single nodes that are left out of the means.

``leave_out`` compares the metrics of the nodes with the ranges of the tasks' metrics. A
metric that most nodes have outside of its range is another metric, or the run has
diverged: it stays.
"""

from __future__ import annotations

import logging
import math
import re
import statistics
from collections.abc import Collection, Mapping
from typing import Any

from flwr.app import MetricRecord, RecordDict

from fedbn_flwr.compat.flower import filled, values_of
from fedbn_flwr.messages.protocol import EXAMPLES_TESTED
from fedbn_flwr.messages.records import of_kind
from fedbn_flwr.server.methods.method import Node
from fedbn_flwr.server.runs.failures import was_tested
from fedbn_flwr.training.tasks import METRICS, quantity_of

__all__ = ["leave_out", "without"]

logger = logging.getLogger("flwr")

_RANGES = {"mae": (0.0, math.inf), "rmse": (0.0, math.inf), "r2": (-math.inf, 1.0)}
"""The ranges of the metrics that are not shares."""
_FAR = 1000  # times the median: no mean of log-densities is so much lower elsewhere
_MOST_SHOWN = 3  # metrics in a line of the log


def leave_out(
    metrics: Mapping[Node, dict[str, float]],
    warned: set[tuple[int, str]],
    losses: str = ".*loss",
) -> None:
    """Remove the metrics outside of their ranges, and warn once about each node.

    Args:
        metrics: the metrics of each node.
        warned: ids of nodes with earlier warnings, and the metric of each.
        losses: a pattern of the losses that must be finite.
    """
    said: dict[Node, list[str]] = {}
    for name in dict.fromkeys(name for values in metrics.values() for name in values):
        given = {node: own[name] for node, own in metrics.items() if name in own}
        low, high = _range(name, [*given.values()], metrics.values())
        finite = re.fullmatch(losses, name, re.DOTALL)
        prefix = name.removesuffix("loss")
        wrong = [
            node
            for node, value in given.items()
            if value < low
            or value > high
            or (finite and value != value and was_tested(prefix, metrics[node]))
        ]
        if 2 * len(wrong) > len(given):
            continue
        for node in wrong:
            value = metrics[node].pop(name)
            if (node.node_id, name) not in warned:
                warned.add((node.node_id, name))
                said.setdefault(node, []).append(f"{name} = {value:g}")
    for node, texts in said.items():
        logger.warning(
            "%s: %d of its metrics cannot be right and are left out of the means: %s."
            " Check this node.",
            node,
            len(texts),
            ", ".join(texts[:_MOST_SHOWN]),
        )


def _range(
    name: str, values: list[float], replies: Collection[Mapping[str, Any]]
) -> tuple[float, float]:
    """Return the range of a metric; a user's own metric has any value but no range."""
    quantity = quantity_of(name)
    if quantity == "loss":
        low = -_FAR * (1 + statistics.median_low(map(abs, values)))
        return low, math.nextafter(math.inf, 0)
    if quantity not in METRICS:
        return -math.inf, math.inf
    # A test of a user's own code may have percents.
    ours = [
        any(key == EXAMPLES_TESTED or key.endswith("-num-examples") for key in own)
        for own in replies
    ]
    return _RANGES.get(quantity, (0.0, 1.0 if 2 * sum(ours) > len(ours) else 100.0))


def without(content: RecordDict, kept: Mapping[str, float]) -> RecordDict:
    """Return a reply's content without the numbers that are not in ``kept``."""
    records = dict(content)
    for key, record in of_kind(content, MetricRecord).items():
        values = values_of(record)
        left = {k: v for k, v in values.items() if isinstance(v, list) or k in kept}
        if len(left) == len(values):
            return content
        records[key] = filled(MetricRecord, left)
    return filled(RecordDict, records)

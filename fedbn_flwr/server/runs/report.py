"""The report of a round, and averages of its metrics."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import MetricRecord, RecordDict

from fedbn_flwr.errors import split_code
from fedbn_flwr.messages.kinds import of_kind
from fedbn_flwr.messages.protocol import (
    DROPPED_BATCHES,
    EXAMPLES_PROCESSED,
    EXAMPLES_TESTED,
    NUM_EXAMPLES,
    STEPS,
)
from fedbn_flwr.messages.traffic import Traffic
from fedbn_flwr.training.tasks import METRICS, quantity_of

__all__ = ["AVERAGED", "RoundReport", "average_metrics"]

logger = logging.getLogger("flwr")


@dataclass
class RoundReport:
    """The server's report of one round.

    Attributes:
        server_round: counted from 1.
        phase: the method's phase ("train", "frozen", ...).
        train: traffic of the training messages.
        evaluate: traffic of the evaluation messages.
        participants: partition ids of the replies that were used, in order.
        rejected: node id to the reason why its reply was refused.
        codes: node id to the codes of these reasons, where they have any.
        asked: number of clients that training messages were sent to.
        replied: number of their replies, also of those that were refused.
        kept_previous: whether the global model did not change, for too few usable
            replies.
        diverged: the losses that are not finite, in words; empty if all are finite.
        diverged_at: the round in which this divergence began.
        privacy: what the protection did in this round, and the privacy spent so far, by
            key.
        metrics: averaged training metrics.
        clients: training metrics by partition id.
        evaluations: evaluation metrics by partition id.
    """

    server_round: int
    phase: str
    train: Traffic = field(default_factory=Traffic)
    evaluate: Traffic = field(default_factory=Traffic)
    participants: list[int | None] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    codes: dict[int, set[str]] = field(default_factory=dict)
    asked: int = 0
    replied: int = 0
    kept_previous: bool = False
    diverged: list[str] = field(default_factory=list)
    diverged_at: int | None = None
    privacy: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)

    def reject(self, node_id: int, reason: str) -> None:
        """Add the reason why a node's reply was refused to earlier reasons of this
        round; it may have a code.
        """
        code, text = split_code(reason)
        if code:
            self.codes.setdefault(node_id, set()).add(code)
        before = self.rejected.get(node_id)
        self.rejected[node_id] = text if before is None else f"{before}; {text}"


_COUNTS = (NUM_EXAMPLES, EXAMPLES_PROCESSED, EXAMPLES_TESTED, STEPS, DROPPED_BATCHES)
_OF_SET = f"-{NUM_EXAMPLES}"  # of one test set
AVERAGED = "averages weighted by examples, counts summed"
"""The result of ``average_metrics`` in words, for the log."""


def average_metrics(
    contents: Sequence[RecordDict], weighted_by_key: str
) -> MetricRecord:
    """Return the average of each metric over the clients that report it, weighted by
    ``weighted_by_key``.

    A metric of a test set, ``<test set>-...``, is weighted by
    ``<test set>-num-examples`` where a client reports that. Counts of this package
    (steps, examples, dropped batches, ``<test set>-num-examples``) are summed instead,
    if they are whole numbers. A client whose test set does not define a metric of a
    task (NaN) does not count for it.

    Flower's own average divides by the weight of all clients, even if only some report
    the metric. It also fails on values of different shapes; here these are left out
    with a warning.
    """
    values: dict[str, list[tuple[float, Any]]] = {}
    for content in contents:
        (record,) = of_kind(content, MetricRecord).values()
        weight = float(np.asarray(record[weighted_by_key]))
        sizes = {
            key: value
            for key, value in record.items()
            if key.endswith(_OF_SET) and _is_whole(value)
        }
        sets = {
            key.removesuffix(NUM_EXAMPLES): float(np.asarray(size))
            for key, size in sizes.items()
        }
        for key, value in record.items():
            if key != weighted_by_key:
                # mnist, mnist-m
                fitting = (
                    [prefix for prefix in sets if key.startswith(prefix)]
                    if sets
                    else []
                )
                values.setdefault(key, []).append(
                    (sets[max(fitting, key=len)] if fitting else weight, value)
                )
    averaged = MetricRecord()
    for key, pairs in values.items():
        if (
            len({len(value) if isinstance(value, list) else None for _, value in pairs})
            > 1
        ):
            logger.warning(
                "metric '%s' has different shapes at different clients and is not"
                " averaged",
                key,
            )
            continue
        if _is_count(key) and all(_is_whole(value) for _, value in pairs):
            averaged[key] = int(sum(value for _, value in pairs))
            continue
        if quantity_of(key) in METRICS:  # which may be NaN
            pairs = [
                (weight, value) for weight, value in pairs if value == value
            ] or pairs
        if not (total := sum(weight for weight, _ in pairs)):
            continue  # of empty test sets alone
        terms = [
            np.asarray(value, dtype=np.float64) * (weight / total)
            for weight, value in pairs
        ]
        averaged[key] = np.asarray(functools.reduce(np.add, terms)).tolist()
    return averaged


def _is_count(key: str) -> bool:
    """Return whether a metric has the name of a count of this package; a user's
    ``mean-local-steps`` has not.
    """
    return key in _COUNTS or key.endswith(_OF_SET)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, float)) and float(value).is_integer()

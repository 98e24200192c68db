"""The averages and sums of the metrics that clients report."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import MetricRecord, RecordDict

from fedbn_flwr.messages.protocol import (
    DROPPED_BATCHES,
    EXAMPLES_NOT_FINITE,
    EXAMPLES_PROCESSED,
    EXAMPLES_TESTED,
    NUM_EXAMPLES,
    STEPS,
)
from fedbn_flwr.training.tasks import METRICS

__all__ = ["AVERAGED", "average_metrics"]

_MAY_BE_NAN = tuple(f"-{name}" for name in METRICS)
_COUNTS = (NUM_EXAMPLES, EXAMPLES_PROCESSED, EXAMPLES_NOT_FINITE, EXAMPLES_TESTED, STEPS, DROPPED_BATCHES)
AVERAGED = "averages weighted by examples, counts summed"
"""The result of ``average_metrics`` in words, for the log."""

logger = logging.getLogger("flwr")


def average_metrics(contents: Sequence[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Return the average of each metric over the clients that report it, weighted by ``weighted_by_key``.

    A metric of a test set, ``<test set>-...``, is weighted by ``<test set>-num-examples`` where a client reports that.
    Counts of this package (steps, examples, dropped batches, ``<test set>-num-examples``) are summed instead, if they
    are whole numbers. A client whose test set does not define a metric of a task (NaN) does not count for it.

    Flower's own average divides by the weight of all clients, even if only some report the metric. It also fails on
    values of different shapes; here these are left out with a warning.
    """
    values: dict[str, list[tuple[float, Any]]] = {}
    for content in contents:
        (record,) = content.metric_records.values()
        weight = float(np.asarray(record[weighted_by_key]))
        sizes = {key: value for key, value in record.items() if _is_of_set(key) and _is_whole(value)}
        sets = {key.removesuffix(NUM_EXAMPLES): float(np.asarray(size)) for key, size in sizes.items()}
        for key, value in record.items():
            if key != weighted_by_key:
                of = max((prefix for prefix in sets if key.startswith(prefix)), key=len, default="")  # mnist, mnist-m
                values.setdefault(key, []).append((sets.get(of, weight), value))
    averaged = MetricRecord()
    for key, pairs in values.items():
        if len({np.shape(value) for _, value in pairs}) > 1:
            logger.warning("metric '%s' has different shapes at different clients and is not averaged", key)
            continue
        if _is_count(key) and all(_is_whole(value) for _, value in pairs):
            averaged[key] = int(sum(value for _, value in pairs))
            continue
        if f"-{key}".endswith(_MAY_BE_NAN):
            pairs = [(weight, value) for weight, value in pairs if value == value] or pairs
        if not (total := sum(weight for weight, _ in pairs)):
            continue  # of empty test sets alone
        terms = [np.asarray(value, dtype=np.float64) * (weight / total) for weight, value in pairs]
        averaged[key] = np.asarray(functools.reduce(np.add, terms)).tolist()
    return averaged


def _is_count(key: str) -> bool:
    """Return whether a metric has the name of a count of this package; a user's ``mean-local-steps`` has not."""
    return key in _COUNTS or _is_of_set(key)


def _is_of_set(key: str) -> bool:
    return key.endswith(f"-{NUM_EXAMPLES}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, float)) and float(value).is_integer()

"""The report of a round, and averages of its metrics."""

from __future__ import annotations

import functools
import logging
import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from flwr.app import MetricRecord, RecordDict

from fedbn_flwr.errors import one_line, split_code
from fedbn_flwr.messages.protocol import (
    DROPPED_BATCHES,
    EXAMPLES_PROCESSED,
    EXAMPLES_TESTED,
    LOSS,
    NUM_EXAMPLES,
    STEPS,
)
from fedbn_flwr.messages.records import Traffic, of_kind
from fedbn_flwr.messages.site_names import with_name
from fedbn_flwr.server.methods.method import Node
from fedbn_flwr.training.tasks import METRICS, in_percent, quantity_of

logger = logging.getLogger("flwr")

K = TypeVar("K")


@dataclass
class RoundReport:
    """The server's report of one round.

    Attributes:
        server_round: counted from 1.
        phase: the method's phase ("train", "frozen", ...).
        train: traffic of the training messages.
        evaluate: traffic of the evaluation messages.
        participants: partition ids of the usable replies, in order.
        rejected: node id to the reason why its reply was refused, after the name of
            the node.
        reasons: node id to this reason, without the name of the node.
        codes: node id to the codes of these reasons, if they have any.
        asked: number of clients that received training messages.
        expected: number of clients that would have been asked if none were lost.
        missing: labels of the clients that were lost since the start, or whose reply
            was not used.
        replied: number of their replies, including refused replies.
        kept_previous: whether the global model did not change, because too few replies
            were usable.
        diverged: descriptions of the non-finite losses; empty if all are finite.
        diverged_at: the first round of this divergence.
        privacy: the protection's record of this round, and the privacy spent so far, by
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
    reasons: dict[int, str] = field(default_factory=dict)
    codes: dict[int, set[str]] = field(default_factory=dict)
    asked: int = 0
    expected: int = 0
    missing: list[str] = field(default_factory=list)
    replied: int = 0
    kept_previous: bool = False
    diverged: list[str] = field(default_factory=list)
    diverged_at: int | None = None
    privacy: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)

    def reject(self, node: Node, reason: str) -> None:
        """Add the reason why a node's reply was refused, possibly with a code."""
        code, text = split_code(reason)
        text = one_line(text)
        if code:
            self.codes.setdefault(node.node_id, set()).add(code)
        # There may be two reasons: a step lost the node, and its reply was refused.
        if node.node_id in self.reasons:
            text = f"{self.reasons[node.node_id]}; {text}"
        self.reasons[node.node_id] = text
        self.rejected[node.node_id] = f"{node}: {text}"

    def absences(self, names: Mapping[str, str]) -> str:
        """Return how many clients took part and who is missing, or nothing.

        ``names`` are the names of the sites, by label.
        """
        used = len(self.participants)
        if used >= self.expected:
            return ""
        missing = [with_name(label, names.get(label)) for label in self.missing]
        return f"{used} of {self.expected} clients; missing: {first_five(missing)}"


def first_five(names: Sequence[str]) -> str:
    """Return the first five names, and the number of further names."""
    more = f" and {len(names) - 5} others" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


_COUNTS = (NUM_EXAMPLES, EXAMPLES_PROCESSED, EXAMPLES_TESTED, STEPS, DROPPED_BATCHES)
_OF_SET = f"-{NUM_EXAMPLES}"  # the ending of the count of one test set
# A user's loss may be negative, but it is not so far below the losses of the others.
_FAR_BELOW = 1000


def average_metrics(
    contents: Sequence[RecordDict], weighted_by_key: str
) -> MetricRecord:
    """Return the weighted average of each metric over the clients that report it.

    The weight is ``weighted_by_key``. A metric of a test set, ``<test set>-...``, is
    weighted by ``<test set>-num-examples`` instead if a client reports it. Counts of
    this package (steps, examples, dropped batches, ``<test set>-num-examples``) are
    summed instead if they are whole numbers. A client whose test set does not define a
    metric of a task (NaN) does not count for that metric.

    Flower's own average divides by the weight of all clients, even if only some report
    the metric. It also fails on values of different shapes; here, such metrics are left
    out with a warning.
    """
    reported: dict[str, list[tuple[float, Any]]] = {}
    tested = False  # whether a reply is from a test of this package
    for content in contents:
        (record,) = of_kind(content, MetricRecord).values()
        weight = float(np.asarray(record[weighted_by_key]))
        # the number of examples of each test set, by the prefix of its metrics
        sizes = {}
        for key, value in record.items():
            if key.endswith(_OF_SET) and _is_whole(value):
                sizes[key.removesuffix(NUM_EXAMPLES)] = float(np.asarray(value))
        tested |= bool(sizes) or EXAMPLES_TESTED in record
        for key, value in record.items():
            if key != weighted_by_key:
                own = _size_for(key, sizes, weight) if sizes else weight
                reported.setdefault(key, []).append((own, value))
    averaged = MetricRecord()
    for key, pairs in reported.items():
        odd = odd_values(key, dict(enumerate(value for _, value in pairs)), reported)
        pairs = [pair for i, pair in enumerate(pairs) if i not in odd]
        values = [value for _, value in pairs]
        if len({_length(value) for value in values}) > 1:
            logger.warning(
                "metric '%s' has different shapes at different clients and is not"
                " averaged",
                key,
            )
            continue
        # A user's ``mean-local-steps`` is not a count of this package.
        is_count = key in _COUNTS or key.endswith(_OF_SET)
        if is_count and all(_is_whole(value) for value in values):
            averaged[key] = int(sum(values))
            continue
        # A metric of a task may be NaN if the client's test does not define it.
        quantity = quantity_of(key)
        if quantity in METRICS or (tested and quantity != LOSS):
            defined = [(weight, value) for weight, value in pairs if value == value]
            pairs = defined or pairs
        total = sum(weight for weight, _ in pairs)
        if total:  # otherwise the test sets are empty
            terms = [
                np.asarray(value, dtype=np.float64) * (weight / total)
                for weight, value in pairs
            ]
            averaged[key] = np.asarray(functools.reduce(np.add, terms)).tolist()
    return averaged


def odd_values(
    name: str, values: Mapping[K, Any], names: Collection[str]
) -> dict[K, str]:
    """Return a text about each value of a metric that is left out of the mean, by key.

    It has another length than most values, or is out of its range. A value that most
    clients have out of the range is not odd: the metric is another one with the same
    name, or the run has diverged.

    Args:
        name: the metric.
        values: its values.
        names: the metrics of all replies: they show whether the tests are this
            package's, since a user's own test may have percents.
    """
    counts = Counter(_length(value) for value in values.values())
    usual, count = counts.most_common(1)[0]
    if len(counts) > 1 or usual is not None:
        shapes = {
            key: f"its metric '{name}' has another length than most, and is left out"
            for key, value in values.items()
            if _length(value) != usual
        }
        return shapes if 2 * count > len(values) else {}
    quantity = quantity_of(name)
    low, high = -math.inf, math.inf
    if quantity == "loss":
        low = -_FAR_BELOW * (1 + statistics.median_low(map(abs, values.values())))
    elif in_percent(quantity) and quantity in METRICS:
        ours = any(key == EXAMPLES_TESTED or key.endswith(_OF_SET) for key in names)
        low, high = 0.0, 1.0 if ours else 100.0
    odd = {
        key: f"its metric '{name}' is {value:g}, and is left out of the mean"
        for key, value in values.items()
        if value < low
        or value > high
        or (quantity == "loss" and not math.isfinite(value))
    }
    return odd if 2 * len(odd) <= len(values) else {}


def _length(value: Any) -> int | None:
    """Return the length of a metric, or None for a single number."""
    return len(value) if isinstance(value, list) else None


def _size_for(key: str, sizes: Mapping[str, float], otherwise: float) -> float:
    """Return the size of the test set of a metric.

    ``otherwise`` is returned if the metric does not belong to a test set.
    """
    # Take the longest name: "mnist-m-loss" also begins with the name of set "mnist".
    fitting = [prefix for prefix in sizes if key.startswith(prefix)]
    return sizes[max(fitting, key=len)] if fitting else otherwise


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, float)) and float(value).is_integer()

"""The average from Flower's secure aggregation, in the form of replies.

``SecAggPlusWorkflow`` sums masked and quantised vectors. It calls ``aggregate_fit``
with the average, weighted by ``num_examples``, instead of every client's arrays. The
average is in float64, within ``clipping_range``, with quantisation errors. An entry
that a method freezes is checked on the average: it may differ from the value that was
sent by no more than these errors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.methods.phases import sums_suffice
from fedbn_flwr.server.runs.run_state import Run
from fedbn_flwr.server.strategy import Strategy

logger = logging.getLogger("flwr")


def refuse_under_secure_aggregation(strategy: Strategy) -> None:
    """Refuse methods that need more than an average, and warn of lost counters.

    Raises:
        ConfigError: the method or a setting needs the arrays of each client; or an
            entry has no dimension, or a dtype that Flower does not quantise.
    """
    # Flower's secure aggregation gives only the average. Report the last method that
    # needs more.
    for method in reversed([*strategy.methods]):
        if not sums_suffice(method.all_phases):
            raise ConfigError(
                f"{method.title} needs the arrays of each client, but Flower's secure"
                " aggregation gives only their average, weighted by num-examples. Use"
                f" {method.instead}, or a workflow without SecAggPlusWorkflow."
            )

    # Flower's quantisation returns wrong values for an entry without a dimension, and
    # for integers.
    entries = strategy.run.facts(0).shared
    integers = [name for name in entries if entries[name].dtype.kind not in "fc"]
    lost = [n for n in entries if entries[n].ndim == 0 and n not in integers]
    if lost:
        raise ConfigError(
            f"entry '{lost[0]}' ({len(lost)} such) has no dimension, but Flower's"
            " secure aggregation returns a wrong value. Give the entry the shape (1,)."
        )
    for name, array in entries.items():
        # The levels of the quantisation overflow in float16, and are real numbers.
        if array.dtype.kind == "c" or array.dtype == np.float16:
            raise ConfigError(
                f"entry '{name}' is {array.dtype}, but Flower's secure aggregation"
                " quantises only float32 and float64. Use a model in float32."
            )
    if integers:
        logger.warning(
            "Flower's secure aggregation rounds integers down. Therefore integer entries"
            " ('%s', ...), such as BN's counters, keep the values that were sent. Only"
            " layers with momentum=None use the counters.",
            integers[0],
        )


def restored(
    entries: State, run: Run, weights: Sequence[float], workflow: Any
) -> dict[str, Array]:
    """Return an averaged record in the dtypes of the model.

    Args:
        entries: the average, in float64. The server's checks handle entries that the
            model does not have.
        run: the run, with the global state that was sent. An entry that is frozen in
            this round gets the value that was sent, unless it has changed by more than
            quantisation does.
        weights: ``num_examples`` of each client in the average.
        workflow: Flower's ``SecAggPlusWorkflow``.
    """
    parts = run.parts.whole
    frozen = run.parts.select(run.round.phase.frozen)
    variances = {running_var for _, running_var in parts.moments()}
    found: dict[str, Array] = {}
    for name, average in entries.items():
        sent = run.round.before.get(name, average)
        if sent.dtype.kind not in "fc" or (
            name in frozen and is_unchanged(average, sent, weights, workflow)
        ):
            found[name] = sent
            continue
        # Quantisation may make a variance near zero negative.
        if name in variances:
            average = np.maximum(average, 0)
        found[name] = average.astype(sent.dtype)
    return found


def is_unchanged(average: Array, sent: Array, weights: Any, workflow: Any) -> bool:
    """Return whether all clients of the average may have returned ``sent``."""
    levels = workflow.quantization_range
    limit = workflow.clipping_range
    # Each client multiplies its values by its weight, clips them, and rounds them to
    # one of the two nearest levels. It computes in the dtype of the values.
    ratios = np.round(np.divide(weights, workflow.max_weight) * levels) / levels
    total = np.multiply.outer(ratios, sent).clip(-limit, limit).sum(0)
    step = 1 / levels + 2 * np.finfo((sent * 1.0).dtype).eps
    error = 2 * limit * len(weights) * step
    return np.allclose(average * ratios.sum(), total, 0, error)

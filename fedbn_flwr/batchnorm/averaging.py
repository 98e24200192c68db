"""Averaging that is safe for BatchNorm. No other module weights client states, averages them or restores dtypes.

Sums are accumulated in float64 in the order given. Callers sort by partition id, so a run repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.errors import ReplyError

__all__ = ["Array", "State", "Variance", "average", "check_finite", "check_state", "normalise", "weighted_sum"]

Array = NDArray[Any]
State = Mapping[str, Array]
Variance = Literal["mean", "pooled"]


def normalise(weights: Sequence[float]) -> list[float]:
    """Return p_i = w_i / sum(w).

    Raises:
        ReplyError: a weight is negative or not finite, or all weights are zero.
    """
    if not all(np.isfinite(w) and w >= 0 for w in weights) or not sum(weights) > 0:
        raise ReplyError(f"weights {list(weights)} cannot be averaged: all finite and >= 0, at least one above 0")
    total = float(np.sum(np.asarray(weights, dtype=np.float64)))
    return [float(w) / total for w in weights]


def weighted_sum(arrays: Sequence[Array], p: Sequence[float]) -> Array:
    """Return sum_i p_i x_i in float64 (complex128 for complex arrays), added in the order given."""
    wide = np.complex128 if np.issubdtype(arrays[0].dtype, np.complexfloating) else np.float64
    total: Array = np.zeros(arrays[0].shape, dtype=wide)
    for weight, array in zip(p, arrays, strict=True):
        total += weight * array.astype(wide)
    return total


def average(
    states: Sequence[State], weights: Sequence[float], parts: Parts, variance: Variance = "mean"
) -> dict[str, Array]:
    """Return the average of the clients' states (FedAvg, McMahan 2017, made safe for BatchNorm).

    Args:
        states: one mapping of entry name to array per client, all with the same names and shapes.
        weights: one weight >= 0 per client; this function normalises them to p_i.
        parts: the split of the entries; entries that it does not know count as REST.
        variance: "mean" averages running variances (FedAvg of the papers). "pooled" adds the spread of the client
            means, var = sum p_i (var_i + (mean_i - mean)^2), the variance of the mixture.

    Returns:
        For floating entries sum_i p_i x_i, accumulated in float64 and returned in their dtype. Integer and boolean
        entries (mostly counters) are not averaged: the result is their maximum, in their dtype.
    """
    p = normalise(weights)
    result: dict[str, Array] = {}
    wide: dict[str, Array] = {}
    for name in states[0]:
        arrays = [state[name] for state in states]
        if np.issubdtype(arrays[0].dtype, np.inexact):
            wide[name] = weighted_sum(arrays, p)
            result[name] = wide[name].astype(arrays[0].dtype)
        else:
            result[name] = np.asarray(np.maximum.reduce(arrays))
    if variance == "pooled":
        for mean_name, var_name in parts.moments():
            if mean_name in wide and var_name in wide:
                means = [state[mean_name].astype(np.float64) for state in states]
                spread = weighted_sum([(mean - wide[mean_name]) ** 2 for mean in means], p)
                result[var_name] = (wide[var_name] + spread).astype(states[0][var_name].dtype)
    return result


def check_state(state: State, like: State, parts: Parts) -> None:
    """Raise ReplyError unless a client's state can be averaged.

    Args:
        state: the client's entries.
        like: the expected entries, with their shapes and dtypes.
        parts: the split, which tells the running variances.

    Raises:
        ReplyError: an entry is missing or extra, has another shape or dtype, is not finite, or is a negative running
            variance. The message names the first two problems with the value, and the number of the others.
    """
    problems = [f"entry '{name}' is missing" for name in like if name not in state]
    problems += [f"entry '{name}' was not asked for" for name in state if name not in like]
    variances = {var_name for _, var_name in parts.moments()}
    for name, expected in like.items():
        if name in state:
            problems += _check_entry(name, state[name], expected, name in variances)
    if problems:
        more = f" (and {len(problems) - 2} more)" if len(problems) > 2 else ""
        raise ReplyError("; ".join(problems[:2]) + more)


def check_finite(state: State, subject: str = "") -> None:
    """Raise ReplyError for an array with NaN or infinity; the message is ``subject``, then the first such entry."""
    for name, array in state.items():
        if problems := _check_entry(name, array, array, False):
            raise ReplyError(subject + problems[0])


def _check_entry(name: str, array: Array, expected: Array, is_variance: bool) -> list[str]:
    if array.shape != expected.shape:
        return [f"entry '{name}' has shape {array.shape}, expected {expected.shape}"]
    if array.dtype != expected.dtype:
        return [f"entry '{name}' has dtype {array.dtype}, expected {expected.dtype}"]
    if np.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all():
        bad = array[~np.isfinite(array)].flat[0]
        return [f"entry '{name}' holds {bad}"]
    if is_variance and array.size and float(array.min()) < 0:
        return [f"entry '{name}' holds a negative variance, {float(array.min())}"]
    return []

"""Averaging that is safe for BatchNorm.

``average`` averages states and ``weighted_sum`` adds arrays; server steps use both.
Sums are accumulated in float64 in the given order. Callers sort by partition id, so a
run repeats bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.errors import ReplyError

__all__ = [
    "SumAhead",
    "Variance",
    "average",
    "fits",
    "to_shares",
    "weighted_sum",
    "wide_type",
]

Variance = Literal["mean", "pooled"]

# Number of elements in a block of an entry. A block in float64 has 256 KiB and stays in
# the cache while the clients' values are added.
_BLOCK = 1 << 15


def to_shares(weights: Sequence[float]) -> list[float]:
    """Return p_i = w_i / sum(w).

    Raises:
        ReplyError: a weight is negative, all weights are zero, or their sum is not
            finite.
    """
    total = float(np.sum(np.asarray(weights, dtype=np.float64)))
    if not 0 < total < math.inf or min(weights) < 0:
        raise ReplyError(
            f"weights {list(weights)} cannot be averaged: they must be finite and not"
            " negative, and at least one must be above 0"
        )
    return [float(w) / total for w in weights]


def weighted_sum(arrays: Sequence[Array], p: Sequence[float]) -> Array:
    """Return sum_i p_i x_i in float64 or complex128, added in order."""
    total: Array = np.empty(arrays[0].shape, wide_type(arrays[0]))
    _write_sum(arrays, p, total)
    return total


def wide_type(array: Array) -> type[np.complex128 | np.float64]:
    """Return the type for adding an array's values, float64 or complex128."""
    return np.complex128 if array.dtype.kind == "c" else np.float64


def fits(array: Array, dtype: np.dtype[Any]) -> bool:
    """Return whether all values are finite after conversion to ``dtype``."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(array.astype(dtype)).all())


def _write_sum(arrays: Sequence[Array], p: Sequence[float], into: Array) -> None:
    """Write sum_i p_i x_i into a contiguous array."""
    flat, place = [array.reshape(-1) for array in arrays], into.reshape(-1)
    for start in range(0, place.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        total = np.zeros(place[part].size, wide_type(into))
        for weight, values in zip(p, flat, strict=True):
            _add(values[part], weight, total)
        place[part] = total


def _add(values: Array, weight: float, total: Array) -> None:
    # Multiplication and addition are two operations, because torch's fused operation
    # rounds once instead of twice, and only on some machines.
    total += np.multiply(values, weight, dtype=total.dtype)


class SumAhead:
    """Computes the sums of ``average`` while the states arrive.

    The states are added in the order of the calls, with p_i of all expected senders. If
    the senders differ from these in the end, the sum is divided by the sum of their p_i.
    A state can be freed after its addition, and the bits of the sum do not depend on when
    states arrive.

    Args:
        weights: the weight > 0 of each sender that was asked.
        lost: the senders that are not expected any more; at least one must remain.
    """

    def __init__(
        self, weights: Mapping[int, float], lost: Collection[int] = ()
    ) -> None:
        self._expected = [sender for sender in weights if sender not in lost]
        shares = to_shares([weights[sender] for sender in self._expected])
        unit = shares[0] / weights[self._expected[0]]
        self._p = {sender: unit * weight for sender, weight in weights.items()}
        self._p.update(zip(self._expected, shares, strict=True))
        self._senders: list[int] = []
        self._used: list[float] = []
        self._sums: dict[str, Array] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no state was added."""
        return not self._senders

    def add(self, sender: int, state: State) -> None:
        """Add the real floating entries of the next state."""
        # The first state defines the entries.
        if self.is_empty:
            for name, array in state.items():
                if array.dtype.kind == "f":
                    self._sums[name] = np.zeros(array.shape)
        share = self._p[sender]
        for name, total in self._sums.items():
            flat, sums = state[name].reshape(-1), total.reshape(-1)
            for start in range(0, sums.size, _BLOCK):
                part = slice(start, start + _BLOCK)
                _add(flat[part], share, sums[part])
        self._senders.append(sender)
        self._used.append(share)

    def write(self, name: str, into: Array) -> None:
        """Write the sum of a real floating entry into a contiguous array."""
        # The sum of all p_i is 1. Do not divide by its rounded value.
        total = self._sums[name]
        exact = self._senders == self._expected
        into[...] = total if exact else total / sum(self._used)


def average(
    states: Sequence[State],
    weights: Sequence[float],
    parts: Parts,
    variance: Variance = "mean",
    ahead: SumAhead | None = None,
) -> dict[str, Array]:
    """Return the average of the clients' states (FedAvg, McMahan 2017).

    It is safe for BatchNorm, because counters are not averaged.

    Args:
        states: one mapping of entry name to array per client, all with the same names
            and shapes.
        weights: one weight >= 0 per client; this function normalises them to p_i.
        parts: the split of the entries; unknown entries count as REST.
        variance: "mean" averages running variances (FedAvg of the papers). "pooled"
            adds the spread of the client means, var = sum p_i (var_i + (mean_i -
            mean)^2), the variance of the mixture. A layer's spread is left out if the
            sum exceeds the largest number of the entry's dtype.
        ahead: the sums of the real floating entries, begun while the states arrived.
            Then only the first state must still have all entries.

    Returns:
        For floating entries sum_i p_i x_i, accumulated in float64 and returned in their
        dtype. Integer and boolean entries (mostly counters) are not averaged: the
        result is their maximum, in their dtype.
    """
    p, first = to_shares(weights), states[0]
    pairs = list(parts.moments()) if variance == "pooled" else []
    pairs = [pair for pair in pairs if _all_floating(first, pair)]
    # The averages of these entries stay in float64 until the spread is added.
    pooled = set(itertools.chain(*pairs))
    result: dict[str, Array] = {}
    for name, array in first.items():
        if array.dtype.kind not in "fc":
            result[name] = np.asarray(
                np.maximum.reduce([state[name] for state in states])
            )
            continue
        dtype = wide_type(array) if name in pooled else array.dtype
        result[name] = np.empty(array.shape, dtype)
        if ahead and array.dtype.kind == "f":
            ahead.write(name, result[name])
        else:
            _write_sum([state[name] for state in states], p, result[name])
    averaged = {name: result[name] for name in pooled}
    return result | _with_spread(states, p, pairs, averaged)


def _all_floating(state: State, names: Iterable[str]) -> bool:
    return all(name in state and state[name].dtype.kind in "fc" for name in names)


def _with_spread(
    states: Sequence[State],
    p: Sequence[float],
    pairs: Sequence[tuple[str, str]],
    averaged: State,
) -> dict[str, Array]:
    """Return averaged means, and variances with the spread of the clients' means."""
    result, first = dict[str, Array](), states[0]
    # Compute only the second term of the equation of `reestimation.mixture`, the spread
    # of the means. As for variance="mean", the pass over all entries has already
    # averaged the variances.
    for mean_name, var_name in pairs:
        mean = averaged[mean_name]
        spread = weighted_sum(
            [(state[mean_name].astype(np.float64) - mean) ** 2 for state in states], p
        )
        result[mean_name] = mean.astype(first[mean_name].dtype)
        dtype, variance = first[var_name].dtype, averaged[var_name]
        # Leave out a spread that exceeds the largest number of the dtype.
        if fits(variance + spread, dtype):
            variance = variance + spread
        result[var_name] = variance.astype(dtype)
    return result

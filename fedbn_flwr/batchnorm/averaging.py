"""The check of a state before it is averaged, and averaging that is safe for BatchNorm.

``average`` averages states and ``weighted_sum`` adds arrays; server steps use both.
Sums are accumulated in float64 in the given order. Callers sort by partition id, so a
run repeats bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.errors import NOT_FINITE, STATISTICS_NOT_FINITE, ReplyError

__all__ = [
    "RunningMean",
    "Variance",
    "average",
    "check_finite",
    "check_state",
    "fits",
    "statistics_moved",
    "sum_of_squares",
    "to_shares",
    "weighted_sum",
    "wide_type",
]

Variance = Literal["mean", "pooled"]

# Number of elements in a block of an entry. A block in float64 has 256 KiB and stays in
# the cache while the clients' values are added.
_BLOCK = 1 << 15
# No training gives larger values, unless it has diverged.
_LARGEST = 1e30
# Neither does the square of a weight's norm grow by more in a round.
_GROWTH = 1e12


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
    total: Array = np.zeros(arrays[0].shape, wide_type(arrays[0]))
    for weight, values in zip(p, arrays, strict=True):
        _add(values, weight, total)
    return total


def wide_type(array: Array) -> type[np.complex128 | np.float64]:
    """Return the type for adding an array's values, float64 or complex128."""
    return np.complex128 if array.dtype.kind == "c" else np.float64


def fits(array: Array, dtype: np.dtype[Any]) -> bool:
    """Return whether all values are finite after conversion to ``dtype``."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(array.astype(dtype)).all())


def _add(values: Array, weight: float, total: Array) -> None:
    """Add weight * values to a contiguous array, block by block."""
    flat, sums = values.reshape(-1), total.reshape(-1)
    for start in range(0, sums.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        # Multiplication and addition are two operations, because torch's fused operation
        # rounds once instead of twice, and only on some machines.
        sums[part] += np.multiply(flat[part], weight, dtype=total.dtype)


class RunningMean:
    """The mean of states, of which each is added as soon as it arrives.

    The states are added in the order of the calls, with p_i of all expected senders. If
    the senders differ from these in the end, the sum is divided by the sum of their p_i.
    A state can be freed after its addition, and the bits of the sum do not depend on when
    states arrive.

    Args:
        weights: the weight > 0 of each sender that was asked.
        lost: the senders that are not expected any more; at least one must remain.

    Attributes:
        sums: the sums of the real floating entries; empty before the first state.
    """

    def __init__(
        self, weights: Mapping[int, float], lost: Collection[int] = ()
    ) -> None:
        self._expected = [sender for sender in weights if sender not in lost]
        shares = to_shares([weights[sender] for sender in self._expected])
        self._p = dict(zip(self._expected, shares, strict=True))
        for sender in weights.keys() & set(lost):  # its reply may come all the same
            unit = shares[0] / weights[self._expected[0]]
            self._p[sender] = unit * weights[sender]
        self._used: dict[int, float] = {}
        self.sums: dict[str, Array] = {}

    def add(self, sender: int, state: State) -> None:
        """Add the real floating entries of the next state."""
        # The first state defines the entries.
        for name, array in state.items() if not self._used else ():
            if array.dtype.kind == "f":
                self.sums[name] = np.zeros(array.shape)
        share = self._used[sender] = self._p[sender]
        for name, total in self.sums.items():
            _add(state[name], share, total)

    def of(self, name: str) -> Array:
        """Return the mean of an entry in float64."""
        # The sum of all p_i is 1. Do not divide by its rounded value.
        exact = [*self._used] == self._expected
        return self.sums[name] if exact else self.sums[name] / sum(self._used.values())


def average(
    states: Sequence[State],
    weights: Sequence[float],
    parts: Parts,
    variance: Variance = "mean",
    mean: RunningMean | None = None,
) -> dict[str, Array]:
    """Return the average of the clients' states (FedAvg, McMahan 2017).

    It is safe for BatchNorm, because counters are not averaged.

    Args:
        states: one mapping of entry name to array per client, all with the same names
            and shapes.
        weights: one weight >= 0 per client, normalised to p_i.
        parts: the split of the entries; unknown entries count as REST.
        variance: "mean" averages running variances (FedAvg of the papers). "pooled"
            adds the spread of the client means, var = sum p_i (var_i + (mean_i -
            mean)^2), the variance of the mixture. A layer's spread is left out if the
            sum exceeds the largest number of the entry's dtype.
        mean: the mean of the states, if they were added while they arrived. Then only
            the first state must still have its floating entries.

    Returns:
        For floating entries sum_i p_i x_i, accumulated in float64 and returned in their
        dtype. Integer and boolean entries (mostly counters) are not averaged: the
        result is their maximum, in their dtype.
    """
    p, first = to_shares(weights), states[0]

    def mean_of(name: str) -> Array:
        if mean is not None and name in mean.sums:
            return mean.of(name)
        return weighted_sum([state[name] for state in states], p)

    result: dict[str, Array] = {}
    for name, array in first.items():
        if array.dtype.kind in "fc":
            result[name] = mean_of(name).astype(array.dtype)
        else:
            every = [state[name] for state in states]
            result[name] = np.asarray(np.maximum.reduce(every))
    # "pooled" adds the second term of the equation of `reestimation.mixture`, the spread
    # of the means. The variances are averaged already.
    for pair in parts.moments() if variance == "pooled" else ():
        if not all(name in first and first[name].dtype.kind in "fc" for name in pair):
            continue
        mean_name, var_name = pair
        middle, dtype = mean_of(mean_name), first[var_name].dtype
        spread = weighted_sum(
            [(state[mean_name].astype(np.float64) - middle) ** 2 for state in states], p
        )
        mixture = mean_of(var_name) + spread
        # Leave out a spread that exceeds the largest number of the dtype.
        if fits(mixture, dtype):
            result[var_name] = mixture.astype(dtype)
    return result


# --- the check of a state -------------------------------------------------------------


def check_state(
    state: State, like: State, parts: Parts, subject: str = ""
) -> tuple[float, float]:
    """Raise ReplyError unless a client's state can be averaged.

    The result is the norm of its floating entries, and the norm of the weights.

    Args:
        state: the client's entries.
        like: the expected entries, with their shapes and dtypes.
        parts: the split of the entries; it identifies the running variances.
        subject: the beginning of the error.

    Raises:
        ReplyError: an entry is missing or extra, has another shape or dtype, is not
            finite, is a negative running variance, exceeds 1e30 although the expected
            entry does not, or is a weight with a million times the norm that was sent.
            The message has the first two problems, with their
            values, and the number of further problems.
    """
    problems = [f"entry '{name}' is missing" for name in like if name not in state]
    problems += [
        f"entry '{name}' was not asked for" for name in state if name not in like
    ]
    variances = {var_name for _, var_name in parts.moments()}
    not_finite = set()
    total = of_weights = 0.0
    for name, expected in like.items():
        if name not in state:
            continue
        array = state[name]
        squares = sum_of_squares(array)
        total += squares
        of_weights += squares if name in parts.weights else 0.0
        if (array.shape, array.dtype) != (expected.shape, expected.dtype):
            problems.append(_misfit(name, array, expected))
        elif problem := _not_finite(name, array, squares, expected):
            problems.append(problem)
            not_finite.add(name)
        elif (
            squares > _GROWTH
            and name in parts.weights
            and squares > _GROWTH * (1 + sum_of_squares(expected))
        ):
            norm, before = math.sqrt(squares), math.sqrt(sum_of_squares(expected))
            problems.append(
                f"entry '{name}' has the norm {norm:.3g}, and was sent with {before:.3g}"
            )
            not_finite.add(name)
        elif name in variances and state[name].size and float(state[name].min()) < 0:
            problems.append(
                f"entry '{name}' has a negative variance, {float(state[name].min())}"
            )
    code = NOT_FINITE if not_finite else None
    if not_finite and not_finite.issubset(parts.whole.statistics):
        code = STATISTICS_NOT_FINITE
    if problems:
        more = f" (and {len(problems) - 2} more)" if len(problems) > 2 else ""
        raise ReplyError(subject + "; ".join(problems[:2]) + more, code=code)
    return math.sqrt(total), math.sqrt(of_weights)


def check_finite(state: State, subject: str = "") -> float:
    """Raise ReplyError for an array with NaN, infinity or a value above 1e30.

    The message is ``subject``, followed by the name of the first such entry. The result
    is the norm of the arrays.
    """
    total = 0.0
    for name, array in state.items():
        squares = sum_of_squares(array)
        total += squares
        if problem := _not_finite(name, array, squares):
            raise ReplyError(subject + problem, code=NOT_FINITE)
    return math.sqrt(total)


def sum_of_squares(array: Array) -> float:
    """Return the sum of the squares of a floating array, otherwise 0."""
    if array.dtype.kind not in "fc":
        return 0.0
    squares = float(np.vdot(array, array).real)
    # The sum may have overflowed in the dtype of the array.
    if not math.isfinite(squares):
        with np.errstate(over="ignore"):
            squares = float(np.square(np.abs(array), dtype=np.float64).sum())
    return squares


def _misfit(name: str, array: Array, expected: Array) -> str:
    if array.shape != expected.shape:
        return f"entry '{name}' has shape {array.shape}, expected {expected.shape}"
    return (
        f"entry '{name}' has dtype {array.dtype}, expected {expected.dtype}. If training"
        " replaces a buffer by another tensor, copy its values: buffer.copy_(new)"
    )


def _not_finite(
    name: str, array: Array, squares: float, expected: Array | None = None
) -> str:
    # Test the sum of squares first, because it needs no memory. If it is large, check
    # each value.
    if squares < _LARGEST:
        return ""
    fits = np.isfinite(array)
    # One large value would make the average useless for all clients. The model itself
    # may have such values, as in a mask.
    if expected is None or _is_usual(expected).all():
        fits &= _is_usual(array)
    return "" if fits.all() else f"entry '{name}' contains {array[~fits].flat[0]}"


def _is_usual(array: Array) -> Array:
    usual: Array = np.abs(array).astype(np.float64) < _LARGEST
    return usual


def statistics_moved(state: State, pairs: Iterable[tuple[str, str]]) -> bool:
    """Return whether a running mean is not 0, or a running variance is not 1.

    ``pairs`` are the names of mean and variance of each layer.
    """
    return any(
        (state[mean] != 0).any() or (state[variance] != 1).any()
        for mean, variance in pairs
    )

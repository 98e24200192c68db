"""The check of a state before it is averaged."""

from __future__ import annotations

import math

import numpy as np

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.errors import NOT_FINITE, STATISTICS_NOT_FINITE, ReplyError

__all__ = ["check_finite", "check_state", "sum_of_squares"]

# No training gives larger values, unless it has diverged.
_LARGEST = 1e30
# Neither does the square of a weight's norm grow by more in a round.
_GROWTH = 1e12


def check_state(state: State, like: State, parts: Parts) -> tuple[float, float]:
    """Raise ReplyError unless a client's state can be averaged.

    The result is the norm of its floating entries, and the norm of the weights.

    Args:
        state: the client's entries.
        like: the expected entries, with their shapes and dtypes.
        parts: the split of the entries; it identifies the running variances.

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
        elif problem := (
            _not_finite(name, array, squares, expected)
            or _grown(name, squares, expected, parts)
        ):
            problems.append(problem)
            not_finite.add(name)
        elif name in variances and state[name].size and float(state[name].min()) < 0:
            problems.append(
                f"entry '{name}' has a negative variance, {float(state[name].min())}"
            )
    code = NOT_FINITE if not_finite else None
    if not_finite and not_finite.issubset(parts.statistics):
        code = STATISTICS_NOT_FINITE
    if problems:
        more = f" (and {len(problems) - 2} more)" if len(problems) > 2 else ""
        raise ReplyError("; ".join(problems[:2]) + more, code=code)
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


def _grown(name: str, squares: float, expected: Array, parts: Parts) -> str:
    if squares <= _GROWTH or name not in parts.weights:
        return ""
    before = sum_of_squares(expected)
    if squares <= _GROWTH * (1 + before):
        return ""
    return (
        f"entry '{name}' has the norm {math.sqrt(squares):.3g}, and was sent with"
        f" {math.sqrt(before):.3g}"
    )


def _misfit(name: str, array: Array, expected: Array) -> str:
    if array.shape != expected.shape:
        return f"entry '{name}' has shape {array.shape}, expected {expected.shape}"
    return f"entry '{name}' has dtype {array.dtype}, expected {expected.dtype}"


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

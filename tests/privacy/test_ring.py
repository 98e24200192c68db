"""Fixed-point sums in the ring have a mean within the stated error.

They never overflow, and values out of range are refused by name.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.errors import NOT_FINITE, ConfigError, DataError, ReplyError
from fedbn_flwr.privacy.ring import FixedPoint, split


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(st.integers(1, 60_000), min_size=1, max_size=6),
    value_range=st.sampled_from([1e-3, 1.0, 1000.0, 65536.0]),
    seed=st.integers(0, 2**32),
)
def test_a_mean_has_the_stated_error(
    weights: list[int], value_range: float, seed: int
) -> None:
    """Both ends of the range are included, because their sum is the largest."""
    generator = np.random.default_rng(seed)
    values = [generator.uniform(-value_range, value_range, 20) for _ in weights]
    for own in values:
        own[:2] = value_range, -value_range
    point = FixedPoint(float(sum(weights)), value_range)
    vectors = [
        point.vector({"x": own}, weight)
        for own, weight in zip(values, weights, strict=True)
    ]
    with np.errstate(over="ignore"):
        found = point.mean(np.sum(vectors, axis=0, dtype=np.int64), float(sum(weights)))
    weighted = [weight * own for weight, own in zip(weights, values, strict=True)]
    # Sum column by column, because fsum rounds once.
    exact = [math.fsum(column) / sum(weights) for column in np.transpose(weighted)]
    allowed = point.error(len(weights), sum(weights)) + 2**-51 * value_range
    assert np.abs(found - exact).max() <= allowed


def test_the_error_is_that_of_the_last_digit() -> None:
    """With few digits, the stated error is close to the observed rounding."""
    point = FixedPoint(4.0, 2.0**52)
    values = np.random.default_rng(0).uniform(-1, 1, 1000)
    found = point.mean(point.vector({"x": values}, 1.0), 1.0)
    assert point.error(1, 1.0) == 2**-9
    assert 0.9 * 2**-9 < np.abs(found - values).max() <= 2**-9


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1025.5, "entry 'b' contains a value above 1024, the largest"),
        (
            -np.inf,
            "entry 'b' contains a value that is not finite, so it cannot be masked",
        ),
        (
            np.nan,
            "entry 'b' contains a value that is not finite, so it cannot be masked",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(value: float, message: str) -> None:
    values = {"a": np.zeros(2), "b": np.asarray([1.0, value])}
    with pytest.raises(DataError, match=message) as error:
        FixedPoint(10.0, 1024.0).vector(values, 2.0)
    assert "1025" not in str(error.value), "the server reads it"
    assert error.value.code == ("data" if np.isfinite(value) else NOT_FINITE)


def test_a_range_without_a_digit_after_the_point_is_refused() -> None:
    with pytest.raises(ConfigError, match="need more than 62 bits"):
        FixedPoint(2.0**22, 2.0**40)


def test_a_sum_that_still_holds_a_mask_is_refused() -> None:
    point = FixedPoint(100.0, 1024.0)
    mask = np.random.default_rng(0).integers(-(2**63), 2**63, 8)
    with pytest.raises(ReplyError, match="masks do not cancel"):
        point.mean(point.vector({"x": np.ones(8)}, 1.0) + mask, 1.0)


def test_a_vector_is_split_by_names_whatever_their_order() -> None:
    values = {
        "b": np.arange(6.0).reshape(2, 3),
        "a": np.asarray(7.0),
        "c": np.zeros((0, 2)),
    }
    point = FixedPoint(1.0, 64.0)
    vector = point.vector(values, 1.0)
    again = point.vector(dict(reversed(values.items())), 1.0)
    found = split(point.mean(vector, 1.0), values)
    assert np.array_equal(vector, again)
    assert {name: array.tolist() for name, array in found.items()} == {
        n: v.tolist() for n, v in values.items()
    }

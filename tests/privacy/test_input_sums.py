"""Bounded sums of inputs: mean and deviation against float64 by hand, the bound of a record, and the noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.privacy.input_sums import (
    bounded_mean,
    bounded_sums,
    noisy_scale,
    norm_bound,
    scale_of_sums,
)
from fedbn_flwr.training.input_scale import FeatureMoments, FeatureRanges

RANGES = FeatureRanges((0.0, -5.0, 100.0), (120.0, 5.0, 600.0))


def moments(x: np.ndarray) -> FeatureMoments:
    """The moments of columns; a NaN is missing."""
    count, mean = (~np.isnan(x)).sum(0).astype(float), np.nan_to_num(np.nanmean(x, 0))
    return FeatureMoments(*map(torch.from_numpy, (count, mean, np.nansum((x - mean) ** 2, 0))))


def clients(seed: int = 0) -> list[np.ndarray]:
    """Rows of three clients inside the ranges, some values missing."""
    draw = np.random.default_rng(seed)
    rows = [draw.uniform(RANGES.low, RANGES.high, (size, 3)) ** 1.0 for size in (40, 7, 23)]
    rows[0][draw.random((40, 3)) < 0.2] = np.nan
    return rows


def test_the_sums_give_the_mean_and_the_deviation_of_all_records() -> None:
    rows = clients()
    scale = scale_of_sums(torch.stack([bounded_sums(moments(x), RANGES) for x in rows]).sum(0), RANGES)
    joined = np.concatenate(rows)
    np.testing.assert_allclose(scale.mean, np.nanmean(joined, 0), rtol=1e-13)
    np.testing.assert_allclose(scale.std, np.nanstd(joined, 0), rtol=1e-12)


def test_the_sums_of_the_clients_means_count_each_client_alike() -> None:
    rows = clients()
    rows[1][:, 2] = np.nan  # a client without the feature
    total = torch.stack([bounded_mean(bounded_sums(moments(x), RANGES)) for x in rows if len(x)]).sum(0)
    scale = scale_of_sums(total, RANGES)
    for feature in range(3):
        own = [x[:, feature] for x in rows if not np.isnan(x[:, feature]).all()]
        mean = np.mean([np.nanmean(x) for x in own])
        square = np.mean([np.nanmean(x**2) for x in own])
        assert scale.mean[feature] == pytest.approx(mean, rel=1e-12)
        assert scale.std[feature] == pytest.approx(np.sqrt(square - mean**2), rel=1e-10)
    assert total[0].tolist() == [3, 3, 2]


def test_a_constant_feature_and_one_that_nobody_has() -> None:
    x = np.array([[7.0, np.nan, 100.0], [7.0, np.nan, 600.0]])
    with np.errstate(all="ignore"), pytest.warns(RuntimeWarning):
        found = scale_of_sums(bounded_sums(moments(x), RANGES), RANGES)
    assert found.mean == pytest.approx((7.0, 0.0, 350.0), rel=1e-14)
    assert found.std == pytest.approx((1.0, 1.0, 250.0), rel=1e-14)


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_one_record_changes_the_sums_by_at_most_the_bound(values: list[float], steps: int) -> None:
    """Also the mean over the steps of a signal; the bound is met at the ends of the ranges."""
    ranges = FeatureRanges((-1.0,) * 4, (1.0,) * 4)
    of_steps = np.array([np.roll(values, step) for step in range(steps)])
    of_record = bounded_sums(moments(of_steps), ranges, per_record=steps)
    assert float(of_record.norm()) <= norm_bound(4) * (1 + 1e-12)
    assert float(bounded_mean(of_record).norm()) <= norm_bound(4) * (1 + 1e-12)
    ends = bounded_sums(moments(np.ones((1, 4))), ranges)
    assert float(ends.norm()) == pytest.approx(norm_bound(4), rel=1e-14)


def test_noisy_sums_give_the_range_where_the_noise_is_larger_than_what_they_hold() -> None:
    rows = np.concatenate([np.random.default_rng(1).normal((60, 0, 350), (10, 1, 60), (1000, 3))]).clip(
        RANGES.low, RANGES.high
    )
    sums = bounded_sums(moments(rows), RANGES)
    plain, left = noisy_scale(sums, 0.0, RANGES)
    assert left == []
    np.testing.assert_allclose(plain.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(plain.std, rows.std(0), rtol=1e-12)
    # Variances of u: 0.028, 0.04, 0.058; noise of 35 in 1,000 is above the first alone.
    found, left = noisy_scale(sums, 35.0, RANGES)
    assert left == [0]
    assert (found.mean[0], found.std[0]) == pytest.approx((60.0, 60 / 3**0.5))
    assert found.mean[1:] == pytest.approx(plain.mean[1:])
    uniform, left = noisy_scale(-sums, 1.0, RANGES)
    assert left == [0, 1, 2], "a count below 0"
    assert uniform == RANGES.scale()
    far = sums.clone()
    far[1] = 3 * far[0]
    far[2] = 12 * far[0]
    assert noisy_scale(far, 1.0, RANGES)[0].mean == RANGES.high, "the mean stays in the range"

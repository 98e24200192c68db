"""Validation examples are drawn by class and seed, without splitting a patient."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data import split_off


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    share=st.sampled_from([0.0, 0.1, 0.29, 0.5, 0.9]),
    seed=st.integers(0, 5),
)
def test_the_part_has_its_share_of_every_class(
    sizes: list[int], share: float, seed: int
) -> None:
    """A class differs from its exact share by less than one example.

    The whole part differs by at most a half.
    """
    labels = np.repeat(np.arange(len(sizes)), sizes)
    indices = np.random.default_rng(seed).permutation(len(labels))[::2].astype(np.int64)
    rest, part = split_off(indices, labels, share, seed)
    assert np.array_equal(np.sort(np.concatenate([rest, part])), np.sort(indices))
    assert (np.diff(part) > 0).all()
    assert (np.diff(rest) > 0).all()
    assert len(part) == min(
        int(share * len(indices) + 0.5 + 1e-9), max(len(indices) - 1, 0)
    )
    for label in range(len(sizes)):
        exact = share * (labels[indices] == label).sum()
        assert abs((labels[part] == label).sum() - exact) < 1 + (
            len(part) == len(indices) - 1
        )
    again = [*map(list, split_off(indices[::-1], labels, share, seed))]
    assert again == [[*rest], [*part]], "the order has no meaning"


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=40),
    st.sampled_from([0.1, 0.3, 0.5, 0.9]),
    st.integers(0, 5),
)
def test_rows_of_one_patient_stay_together(
    rows: list[int], share: float, seed: int
) -> None:
    """At least one patient remains for training.

    If each patient has one class, each class misses its share by half a patient.
    """
    units = np.repeat(np.arange(len(rows)) * 7 % 40, rows)
    labels = np.repeat(np.random.default_rng(seed).integers(0, 3, len(rows)), rows)
    indices = np.arange(len(units))
    rest, part = split_off(indices, labels, share, seed, units)
    assert not set(units[rest]) & set(units[part])
    assert len(rest)
    assert np.array_equal(np.sort(np.concatenate([rest, part])), indices)
    if len({*units[rest]}) > 1:
        found, whole = (np.bincount(labels[at], minlength=3) for at in (part, indices))
        # A patient is taken only if this comes nearer, and the numbers are rounded.
        assert np.abs(found - share * whole).max() <= max(rows) / 2 + 1


def test_the_seed_decides_which_examples() -> None:
    labels, indices = np.repeat([0, 1], 50), np.arange(100)
    parts = {tuple(split_off(indices, labels, 0.2, seed)[1]) for seed in range(3)}
    assert len(parts) == 3
    with pytest.raises(ConfigError, match=r"share=1 must be in \[0, 1\)"):
        split_off(indices, labels, 1, 0)

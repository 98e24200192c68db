"""Labels for tests of splits, and the check that a split has each example once."""

from __future__ import annotations

import numpy as np


def labels_of(sizes: list[int]) -> np.ndarray:
    """Return numbers in random order, ``sizes[i]`` times the number i."""
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


def assert_valid(partition: list[np.ndarray], used: np.ndarray) -> None:
    """Check that sorted int64 vectors contain each index of ``used`` once."""
    assert all(
        part.dtype == np.int64 and (np.diff(part) > 0).all() for part in partition
    )
    assert np.array_equal(np.sort(np.concatenate(partition)), used)

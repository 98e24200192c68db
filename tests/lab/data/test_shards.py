"""Splits by shards, balanced and unbalanced, and equal sizes by Dirichlet."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from scipy.stats import chisquare

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.partitioning import make_partition, partition_counts
from studies import shards as module
from tests.support.splits import assert_valid, labels_of

BALANCED, UNBALANCED = "studies.shards:balanced", "studies.shards:unbalanced"
LABELS = labels_of([6000] * 10)
"""Of as many examples as MNIST has."""


def test_the_papers_200_shards_give_each_client_two_classes_at_most() -> None:
    partition = make_partition(BALANCED, LABELS, 100, seed=1)
    counts = partition_counts(partition, LABELS, 10)
    assert_valid(partition, np.arange(len(LABELS)))
    assert set(np.unique(counts)) == {0, 300, 600}
    assert (counts.sum(1) == 600).all()
    # A shard has random examples of its class.
    parts = make_partition(BALANCED, np.zeros(1000, np.int64), 10, seed=0)
    assert all(np.ptp(part) > 500 for part in parts)


def test_the_papers_unbalanced_shards_are_all_used_1_to_30_each() -> None:
    partition = make_partition(UNBALANCED, LABELS, 100, seed=2)
    counts = partition_counts(partition, LABELS, 10)
    assert_valid(partition, np.arange(len(LABELS)))
    assert (counts % 50 == 0).all()  # shards of 50 examples of one class
    held = counts.sum(1) // 50
    assert (held.min(), held.sum()) == (1, 1200)
    assert 25 <= held.max() <= 30


def test_all_numbers_of_shards_per_client_are_equally_likely(
    monkeypatch,
) -> None:
    clients, shards, most, draws = 3, 7, 4, 1200
    monkeypatch.setattr(module, "_MOST_SHARDS_PER_CLIENT", most)
    labels = np.zeros(50 * shards, np.int64)
    found = Counter()
    for seed in range(draws):
        parts = make_partition(UNBALANCED, labels, clients, seed=seed)
        found[tuple(len(part) // 50 for part in parts)] += 1
    sizes = product(range(1, most + 1), repeat=clients)
    assert {*found} == {each for each in sizes if sum(each) == shards}
    # 99.9 % point of chi-square at 11 degrees of freedom: 31.3
    assert chisquare([*found.values()]).statistic < 32


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_dirichlet_equal_draws_each_clients_mix(alpha: float) -> None:
    """The first client draws before any class is used up.

    E sum (n_c / n)^2 = S + (1 - S) / n with S = (alpha + 1) / (C alpha + 1).
    """
    classes, size, draws = 5, 20, 600
    labels = np.repeat(np.arange(classes), 100)
    concentration, first = [], np.zeros(classes)
    for seed in range(draws):
        part = make_partition("dirichlet-equal", labels, 25, seed=seed, alpha=alpha)[0]
        shares = np.bincount(labels[part], minlength=classes) / size
        concentration.append((shares**2).sum())
        first += shares / draws
    mix = (alpha + 1) / (classes * alpha + 1)
    expected = mix + (1 - mix) / size
    standard_error = np.std(concentration) / np.sqrt(draws)
    assert abs(np.mean(concentration) - expected) < 4 * standard_error
    assert np.abs(first - 1 / classes).max() < 0.08


@pytest.mark.parametrize("clients", [1, 4, 7])
def test_there_may_be_as_many_shards_as_examples(clients: int) -> None:
    labels = np.zeros(2 * clients, np.int64)
    parts = make_partition(BALANCED, labels, clients, seed=0)
    assert [*map(len, parts)] == [2] * clients
    with pytest.raises(ConfigError, match="but there are only"):
        make_partition(BALANCED, labels[1:], clients, seed=0)

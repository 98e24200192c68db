"""In splits by group, clients get training and test examples of one domain."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.lab.data import load_dataset
from fedbn_flwr.lab.data.partitioning import (
    make_partition,
    partition_test_set,
    split_dataset,
)
from tests.support.splits import labels_of


@pytest.mark.parametrize(
    ("share", "sizes"),
    [
        (1, [100, 50]),
        (0.29, [29, 14]),
        (7, [7, 7]),
        (50.0, [50, 50]),
    ],
)
def test_a_share_is_a_fraction_of_each_domain_or_a_number_of_examples(
    share: float, sizes: list[int]
) -> None:
    """Clients have one domain in turn, and share its part evenly."""
    groups = labels_of([100, 50])
    given = {"seed": 0, "domain_share": share, "groups": groups}
    parts = make_partition("domain", 0 * groups, 2, **given)
    assert [len(part) for part in parts] == sizes
    several = make_partition("domain", 0 * groups, 7, **given)
    for which, part in enumerate(parts):
        assert {*groups[part]} == {which}
        shares = several[which::2]
        assert np.array_equal(np.sort(np.concatenate(shares)), part)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_natural_gives_a_client_per_group_that_has_examples() -> None:
    groups = np.array([4, 1, 4, 0, 1, 4])
    parts = make_partition("natural", np.zeros(6, np.int64), 3, seed=0, groups=groups)
    assert [part.tolist() for part in parts] == [[3], [1, 4], [0, 2, 5]]


@settings(max_examples=40)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1)
)
def test_with_groups_each_group_is_split_as_one_data_set(
    clients: int, classes: int, many: int, seed: int
) -> None:
    """Each client's test examples per class and group ignore the other groups.

    Their number is the same as if the group were the whole data set.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, 60)
    groups = rng.integers(0, many, 60)
    owner = rng.integers(0, clients, 60)
    test_labels, test_groups = (
        rng.integers(0, classes, 40),
        rng.integers(0, many + 1, 40),
    )
    parts = [np.flatnonzero(owner == client) for client in range(clients)]
    test_parts = partition_test_set(parts, labels, test_labels, 1, groups, test_groups)
    assert len(np.unique(np.concatenate(test_parts))) == sum(map(len, test_parts))
    for group in range(many + 1):
        here, tests = groups == group, test_groups == group
        places = [np.flatnonzero(owner[here] == client) for client in range(clients)]
        alone = partition_test_set(places, labels[here], test_labels[tests], 1)
        for part, own in zip(test_parts, alone, strict=True):
            found = Counter(test_labels[part[tests[part]]])
            assert found == Counter(test_labels[tests][own])


@pytest.mark.parametrize(("name", "clients"), [("domain", 7), ("natural", 5)])
def test_clients_are_tested_on_their_own_domain(name: str, clients: int) -> None:
    data = load_dataset("digits-domains")
    train, test = split_dataset(data, name, clients, seed=3)
    groups, test_groups = data.train.groups.numpy(), data.test.groups.numpy()
    for train_part, test_part in zip(train, test, strict=True):
        assert len(set(groups[train_part].tolist())) == 1
        assert set(test_groups[test_part].tolist()) == set(groups[train_part].tolist())
    assert np.array_equal(np.sort(np.concatenate(test)), np.arange(1795))

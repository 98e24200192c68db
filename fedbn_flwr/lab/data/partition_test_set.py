"""The test examples that belong to a partition of training examples; counts of both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.seeds import numpy_generator

__all__ = ["partition_counts", "partition_test_set"]


def partition_test_set(
    train_partition: Sequence[Indices],
    train_labels: Indices,
    test_labels: Indices,
    seed: int,
    train_groups: Indices | None = None,
    test_groups: Indices | None = None,
) -> list[Indices]:
    """Return each client's test examples: its share of a class as in training.

    The rule is the same for every kind of split. If the data set has groups, a class in
    one group counts as a class, so clients of one domain get test examples of that
    domain. The test examples of a class are split in proportion to the clients'
    training counts, by largest remainder (ties go to the lower partition id); the seed
    decides which examples a client gets. A test example goes to exactly one client, or
    to none if no client has its class in training. A client with few training examples
    may get no test example.

    Args:
        train_partition: indices into ``train_labels`` by partition id.
        train_labels: class of each training example, int64.
        test_labels: class of each test example, int64.
        seed: the run's seed.
        train_groups: group of each training example, int64; None where there are no
            groups.
        test_groups: group of each test example, int64; None where there are no groups.
    """
    # A cell is a class, or a class in a group.
    train_cells, test_cells = np.asarray(train_labels), np.asarray(test_labels)
    num_cells = _highest(train_cells, test_cells) + 1
    if train_groups is not None and test_groups is not None:
        train_cells = train_cells + num_cells * train_groups
        test_cells = test_cells + num_cells * test_groups
        num_cells = _highest(train_cells, test_cells) + 1
    counts = partition_counts(train_partition, train_cells, num_cells)
    # The test examples of all cells, and the client of each.
    given, owners = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    clients = np.arange(len(train_partition))
    for cell, of_clients in enumerate(counts.T):
        examples = np.flatnonzero(test_cells == cell).astype(np.int64)
        total = int(of_clients.sum())
        if not total:
            continue
        # The quota of each client; the largest remainders get what these leave. All
        # numbers are integers, so every machine sees the same ties.
        sizes, remainders = np.divmod(of_clients * len(examples), total)
        left = len(examples) - int(sizes.sum())
        sizes[np.argsort(-remainders, kind="stable")[:left]] += 1
        # "deal-test" is part of the seed: another word would change every split.
        given.append(numpy_generator(seed, "deal-test", cell).permutation(examples))
        owners.append(np.repeat(clients, sizes))
    # Sorted once by client, then by example: no loop over clients and cells, of which
    # there may be thousands each.
    all_given, all_owners = np.concatenate(given), np.concatenate(owners)
    by_client = all_given[np.lexsort((all_given, all_owners))]
    ends = np.cumsum(np.bincount(all_owners, minlength=len(clients)))
    return np.split(by_client, ends[:-1])


def _highest(train: Indices, test: Indices) -> int:
    return int(max(train.max(initial=0), test.max(initial=0)))


def partition_counts(
    partition: Sequence[Indices], labels: Indices, num_classes: int
) -> Indices:
    """Return the examples of each class on each client, int64 (clients, classes)."""
    # One count of (client, class) pairs: thousands of clients take no loop.
    clients = np.repeat(np.arange(len(partition)), [len(part) for part in partition])
    pairs = clients * num_classes + labels[np.concatenate(partition)]
    counts = np.bincount(pairs, minlength=len(partition) * num_classes)
    return counts.reshape(len(partition), -1).astype(np.int64)

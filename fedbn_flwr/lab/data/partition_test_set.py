"""The partition of the test examples that belongs to a partition of the training
examples; counts of a partition.
"""

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
    """Return each client's test examples; its share of a class is the same as in
    training.

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
    train_labels, test_labels = np.asarray(train_labels), np.asarray(test_labels)
    num_cells = int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1
    if train_groups is not None and test_groups is not None:
        train_labels, test_labels = (
            train_labels + num_cells * train_groups,
            test_labels + num_cells * test_groups,
        )
        num_cells = (
            int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1
        )
    counts = partition_counts(train_partition, train_labels, num_cells)
    # test examples, and the client of each
    given, owners = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    clients = np.arange(len(train_partition))
    for label in range(num_cells):
        examples = np.flatnonzero(test_labels == label).astype(np.int64)
        held, total = counts[:, label], int(counts[:, label].sum())
        if total == 0:
            continue
        # All numbers are integers: quotas and remainders are exact, and every machine
        # sees the same ties.
        sizes, remainders = np.divmod(held * len(examples), total)
        sizes[
            np.argsort(-remainders, kind="stable")[: len(examples) - int(sizes.sum())]
        ] += 1
        # "deal-test" is part of the seed: another word would change every split.
        given.append(numpy_generator(seed, "deal-test", label).permutation(examples))
        owners.append(np.repeat(clients, sizes))
    all_given, all_owners = np.concatenate(given), np.concatenate(owners)
    by_client = all_given[np.lexsort((all_given, all_owners))]
    return np.split(
        by_client, np.cumsum(np.bincount(all_owners, minlength=len(clients)))[:-1]
    )


def partition_counts(
    partition: Sequence[Indices], labels: Indices, num_classes: int
) -> Indices:
    """Return the number of examples of each class on each client, int64 (clients,
    classes).
    """
    owners = np.repeat(np.arange(len(partition)), [len(part) for part in partition])
    cells = owners * num_classes + labels[np.concatenate(partition)]
    return (
        np.bincount(cells, minlength=len(partition) * num_classes)
        .reshape(len(partition), -1)
        .astype(np.int64)
    )

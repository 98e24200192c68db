"""The test examples that go with a split of the training examples, and the counts of a split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedbn_flwr.data.splits import Indices
from fedbn_flwr.errors import DataError
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
    """Return each client's test examples: its share of a class in the test set is its share of it in training.

    One rule for every kind of split, data set with groups or without: with groups, a class in one group counts as a
    class of its own, so that clients of one domain get test examples of that domain. The n test examples of a class are
    dealt in proportion to the clients' training counts by largest remainder (ties to the lower partition id), which
    examples is drawn from the seed. Every test example of a class that somebody holds goes to exactly one client; those
    of other classes to nobody. A client of few examples may get none.

    Args:
        train_partition: indices into ``train_labels`` by partition id.
        train_labels: class of each training example, int64.
        test_labels: class of each test example, int64.
        seed: the run's seed.
        train_groups: group of each training example, int64; None where there are no groups.
        test_groups: group of each test example, int64; None where there are no groups.

    Raises:
        DataError: one of the groups is given without the other.
    """
    train_labels, test_labels = np.asarray(train_labels), np.asarray(test_labels)
    if (train_groups is None) != (test_groups is None):
        raise DataError("dealing the test set needs the groups of training and test examples, or neither.")
    num_cells = int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1
    if train_groups is not None and test_groups is not None:
        train_labels, test_labels = train_labels + num_cells * train_groups, test_labels + num_cells * test_groups
        num_cells = int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1
    counts = partition_counts(train_partition, train_labels, num_cells)
    dealt: list[list[Indices]] = [[] for _ in train_partition]
    for label in range(num_cells):
        examples = np.flatnonzero(test_labels == label).astype(np.int64)
        held, total = counts[:, label], int(counts[:, label].sum())
        if total == 0:
            continue
        # Integers throughout: quotas and remainders are exact, so that ties are ties on every machine.
        sizes, remainders = np.divmod(held * len(examples), total)
        sizes[np.argsort(-remainders, kind="stable")[: len(examples) - int(sizes.sum())]] += 1
        shuffled = numpy_generator(seed, "deal-test", label).permutation(examples)
        for client, part in enumerate(np.split(shuffled, np.cumsum(sizes)[:-1])):
            dealt[client].append(part)
    return [np.sort(np.concatenate([np.empty(0, np.int64), *parts])) for parts in dealt]


def partition_counts(partition: Sequence[Indices], labels: Indices, num_classes: int) -> Indices:
    """Return the number of examples of each class at each client, int64 (clients, classes)."""
    return np.stack([np.bincount(labels[part], minlength=num_classes) for part in partition]).astype(np.int64)

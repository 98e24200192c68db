"""The registry of splits of the training examples over the clients, and the test examples that go with a split.

Every split is a function of its arguments: the same seed gives the same indices on every machine. A split is a list of
sorted, disjoint int64 index vectors by partition id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedbn_flwr.data.splits import Indices, PartitionRequest, listed, split_classes, split_dirichlet, split_iid
from fedbn_flwr.errors import ConfigError, DataError, unknown_name
from fedbn_flwr.seeds import numpy_generator

__all__ = ["PARTITIONS", "PartitionInfo", "PartitionRequest", "deal_test", "make_partition", "partition_counts"]


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A kind of split: its name, one line on it, where it comes from, and the function that makes it."""

    name: str
    summary: str
    source: str
    split: Callable[[PartitionRequest], list[Indices]]


def make_partition(
    name: str,
    labels: Indices,
    num_clients: int,
    *,
    seed: int,
    num_classes: int | None = None,
    alpha: float = 0.5,
    classes_per_client: int = 2,
    min_size: int = 10,
) -> list[Indices]:
    """Return the indices of each client's training examples.

    Args:
        name: a name of ``PARTITIONS``.
        labels: class of each training example, int64 (N,).
        num_clients: number of parts.
        seed: the run's seed.
        num_classes: number of classes; None for the largest label + 1.
        alpha: ``dirichlet``: concentration; small values give clients of few classes.
        classes_per_client: ``classes``: number of consecutive classes of each client.
        min_size: ``dirichlet``: redrawn until every client has as many examples (default as in flwr-datasets).

    Raises:
        ConfigError: a name or number is out of range.
        DataError: the examples do not suffice for the split asked for.
    """
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    labels = np.asarray(labels, dtype=np.int64)
    if num_clients < 1:
        raise ConfigError(f"num-clients={num_clients}: at least 1 needed.")
    if num_clients > len(labels):
        raise DataError(f"num-clients={num_clients}: more than the {len(labels)} training examples. Use fewer clients.")
    found = int(labels.max()) + 1
    num_classes = found if num_classes is None else num_classes
    if labels.min() < 0 or found > num_classes:
        raise DataError(
            f"labels run from {labels.min()} to {found - 1}; num-classes={num_classes} allows 0 to {num_classes - 1}."
        )
    request = PartitionRequest(labels, num_classes, num_clients, seed, alpha, classes_per_client, min_size)
    partition = [np.sort(part) for part in PARTITIONS[name].split(request)]
    _refuse_empty(name, partition)
    return partition


def deal_test(
    train_partition: Sequence[Indices], train_labels: Indices, test_labels: Indices, seed: int
) -> list[Indices]:
    """Return each client's test examples: its share of a class in the test set is its share of it in training.

    One rule for every kind of split. The n test examples of a class are dealt in proportion to the clients' training
    counts by largest remainder (ties to the lower partition id), which examples is drawn from the seed. Every test
    example of a class that somebody holds goes to exactly one client; those of other classes to nobody. A client of few
    examples may get none.

    Args:
        train_partition: indices into ``train_labels`` by partition id.
        train_labels: class of each training example, int64.
        test_labels: class of each test example, int64.
        seed: the run's seed.
    """
    train_labels, test_labels = np.asarray(train_labels), np.asarray(test_labels)
    num_classes = int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1
    counts = partition_counts(train_partition, train_labels, num_classes)
    dealt: list[list[Indices]] = [[] for _ in train_partition]
    for label in range(num_classes):
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


def _refuse_empty(name: str, partition: Sequence[Indices]) -> None:
    """Raise DataError where a client has no examples."""
    empty = {client: 0 for client, part in enumerate(partition) if len(part) == 0}
    if empty:
        raise DataError(
            f"partition {name!r} leaves clients without examples ({listed(empty)}; the other "
            f"{len(partition) - len(empty)} share {sum(map(len, partition))}). Use fewer clients, more classes per "
            "client or a larger data set."
        )


_INFOS = (
    PartitionInfo("iid", "equal random parts", "flwr-datasets IidPartitioner", split_iid),
    PartitionInfo(
        "dirichlet",
        "each class split in proportions drawn from Dirichlet(partition-alpha), unequal sizes",
        "Yurochkin et al. 2019 (arXiv 1905.12022); flwr-datasets DirichletPartitioner",
        split_dirichlet,
    ),
    PartitionInfo(
        "classes",
        "classes-per-client consecutive classes per client, each class evenly over its holders",
        "Wang, Shi & Chang 2023 (FedTAN), Appendix D",
        split_classes,
    ),
)

PARTITIONS: dict[str, PartitionInfo] = {info.name: info for info in _INFOS}

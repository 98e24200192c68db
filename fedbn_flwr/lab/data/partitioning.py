"""The registry of splits of the training examples over the clients.

Every split depends only on its arguments: the same seed gives the same indices on every
machine. The result is a list with a sorted int64 vector of indices for each partition
id. No index is in two vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedbn_flwr.errors import ConfigError, DataError, unknown_name
from fedbn_flwr.lab.data.group_splits import split_domain, split_natural
from fedbn_flwr.lab.data.samples import Dataset, Samples
from fedbn_flwr.lab.data.splits import (
    Indices,
    PartitionRequest,
    split_classes,
    split_dirichlet,
    split_dirichlet_equal,
    split_iid,
)
from fedbn_flwr.lab.own_code import own_function
from fedbn_flwr.training.randomness import numpy_generator


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A kind of split.

    Attributes:
        name: name in the registry.
        summary: one line.
        source: the paper or library.
        split: the function that makes the split.
        by_class: whether the split needs one class per example, so that it refuses
            images with a class for each pixel.
        by_group: whether the split needs a data set with groups.
    """

    name: str
    summary: str
    source: str
    split: Callable[[PartitionRequest], list[Indices]]
    by_class: bool = False
    by_group: bool = False


def partition_info(name: str) -> PartitionInfo:
    """Return the split with a name of ``PARTITIONS``, or of a user's ``module:function``.

    Raises:
        ConfigError: there is no such split.
    """
    if ":" in name:
        split = own_function("partition", name)
        return PartitionInfo(name, "your own function", "own code", split)
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    return PARTITIONS[name]


def _check_parts(
    parts: Sequence[Indices], name: str, num_clients: int, count: int
) -> None:
    """Raise ConfigError unless the parts are numbers of examples, each at most once."""
    whole = np.concatenate([np.empty(0, np.int64), *filter(len, parts)])
    wrong = ""
    if len(parts) != num_clients:
        wrong = f"{len(parts)} parts for {num_clients} clients"
    elif whole.dtype != np.int64 or not (
        0 <= whole.min(initial=0) <= whole.max(initial=0) < count
    ):
        wrong = f"other values than the integers 0 to {count - 1}"
    elif len(np.unique(whole)) < len(whole):
        wrong = "an example twice"
    if wrong:
        raise ConfigError(
            f"partition={name!r} returned {wrong}. Return a list with an int64 vector of"
            " the numbers of the examples for each client."
        )


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
    domain_share: float = 1.0,
    groups: Indices | None = None,
    group_names: Sequence[str] = (),
) -> list[Indices]:
    """Return the indices of each client's training examples.

    Args:
        name: a name of ``PARTITIONS``, or ``module:function``, see ``partition_info``.
        labels: class of each training example, int64 (N,).
        num_clients: number of parts.
        seed: the run's seed.
        num_classes: number of classes; by default, the largest label + 1.
        alpha: ``dirichlet``, ``dirichlet-equal``: concentration; with small values
            clients have few classes.
        classes_per_client: ``classes``: number of consecutive classes of each client.
        min_size: ``dirichlet``: draw again until every client has this many examples
            (default as in flwr-datasets).
        domain_share: ``domain``: fraction (up to 1) or number (above 1) of each
            domain's examples.
        groups: ``domain``, ``natural``: group of each training example, int64 (N,);
            other splits ignore it.
        group_names: names of the groups 0, 1, ... for messages; if empty, messages show
            the numbers.

    Raises:
        ConfigError: a name is unknown or a number is out of range.
        DataError: there are too few examples for this split.
    """
    info = partition_info(name)
    labels = np.asarray(labels, dtype=np.int64)
    if groups is not None:
        groups = np.asarray(groups, dtype=np.int64)
    if num_classes is None:
        num_classes = int(labels.max(initial=-1)) + 1
    if not 1 <= num_clients <= len(labels):
        raise DataError(
            f"num-clients={num_clients} is not allowed. Use 1 to {len(labels)}, the"
            " number of training examples."
        )
    # The request has the settings of all splits; each split uses only some of them.
    request = PartitionRequest(
        labels=labels,
        num_classes=num_classes,
        num_clients=num_clients,
        seed=seed,
        alpha=alpha,
        classes_per_client=classes_per_client,
        min_size=min_size,
        domain_share=domain_share,
        groups=groups,
        group_names=tuple(group_names),
    )
    # Sort each client's examples, so that the partition does not depend on the order in
    # which the split drew them.
    parts = [np.asarray(part) for part in info.split(request)]
    _check_parts(parts, name, num_clients, len(labels))
    partition = [np.sort(part).astype(np.int64) for part in parts]
    empty = sum(not len(part) for part in partition)
    if empty:
        raise DataError(
            f"partition {name!r} leaves {empty} of {num_clients} clients without"
            " examples. Use fewer clients, more classes per client or a larger data"
            " set."
        )
    return partition


def split_dataset(
    dataset: Dataset, name: str, num_clients: int, *, seed: int, **settings: Any
) -> tuple[list[Indices], list[Indices]]:
    """Return the training and the test examples of each client.

    ``make_partition`` splits the training examples, and ``partition_test_set`` the test
    examples. Under ``natural``, a client has all test examples of its group.

    Args:
        dataset: the data to split.
        name: a name of ``PARTITIONS``.
        num_clients: number of parts.
        seed: the run's seed.
        settings: other keyword arguments of ``make_partition``; classes and groups come
            from the data set. All examples of a unit, training or test, go to the
            client that gets the unit's first example.

    Raises:
        ConfigError: as ``make_partition``, or the split is by class and the examples
            have no single class.
        DataError: as ``make_partition``.
    """
    if partition_info(name).by_class and not dataset.train.by_class:
        allowed = ", ".join(
            info.name for info in PARTITIONS.values() if not info.by_class
        )
        raise ConfigError(
            f"partition {name!r} splits by class, but the examples of dataset"
            f" {dataset.name!r} have no single class. Use one of {allowed}."
        )
    labels = dataset.train.labels.cpu().numpy()
    groups, test_groups = _array(dataset.train.groups), _array(dataset.test.groups)
    settings |= {
        "seed": seed,
        "num_classes": len(dataset.label_names),
        "group_names": dataset.group_names,
    }
    # Split only the first example of each unit, and give the client of this example the
    # other examples of the unit.
    first, whole = _units(dataset.train, name)
    if groups is not None:
        settings["groups"] = groups[first]
    train = whole(make_partition(name, labels[first], num_clients, **settings))
    # A client of ``natural`` is a group and gets all tests of this group, even tests of
    # a class that the group has no training example of.
    if name == "natural" and groups is not None and test_groups is not None:
        of_clients = [groups[part[0]] for part in train]
        tests = [np.flatnonzero(test_groups == group) for group in of_clients]
    else:
        test_labels = dataset.test.labels.cpu().numpy()
        first, whole = _units(dataset.test, name)
        of_first = None if test_groups is None else test_groups[first]
        tests = whole(
            partition_test_set(
                train, labels, test_labels[first], seed, groups, of_first
            )
        )
    return train, tests


def _array(values: Tensor | None) -> Indices | None:
    return None if values is None else values.cpu().numpy()


def _units(
    samples: Samples, partition: str
) -> tuple[Indices | slice, Callable[[list[Indices]], list[Indices]]]:
    """Return the first example of each unit, and a function for parts of the units.

    The function returns the sorted examples of the units of each part.
    """
    units, groups = _array(samples.units), _array(samples.groups)
    if units is None:
        return slice(None), list
    # If the split is by group, a unit must not be in two groups: count a patient of two
    # hospitals as two units.
    if groups is not None and partition_info(partition).by_group:
        units = units * (int(groups.max(initial=0)) + 1) + groups
    members = _examples_of_units(units)
    first = np.array([examples[0] for examples in members], np.int64)

    def whole(parts: list[Indices]) -> list[Indices]:
        of_parts = ([members[unit] for unit in part] for part in parts)
        return [np.sort(np.concatenate([first[:0], *one])) for one in of_parts]

    return first, whole


def _examples_of_units(units: Indices) -> list[Indices]:
    """Return the sorted indices of each unit's examples, in the order of the units."""
    order = np.argsort(units, kind="stable")
    starts = np.flatnonzero(np.diff(units[order], prepend=-1))
    # Cut the order at the start of each unit. The first part is empty, because the
    # first unit starts at 0.
    return np.split(order, starts)[1:]


_INFOS = (
    PartitionInfo(
        "iid",
        "equal random parts",
        "flwr-datasets IidPartitioner",
        split_iid,
    ),
    PartitionInfo(
        "dirichlet",
        "each class split in proportions drawn from Dirichlet(partition-alpha), unequal"
        " sizes",
        "Yurochkin et al. 2019 (arXiv:1905.12022); flwr-datasets DirichletPartitioner",
        split_dirichlet,
        by_class=True,
    ),
    PartitionInfo(
        "dirichlet-equal",
        "each client draws its class mix from Dirichlet(partition-alpha), equal sizes",
        "Hsu, Qi & Brown 2019 (arXiv:1909.06335)",
        split_dirichlet_equal,
        by_class=True,
    ),
    PartitionInfo(
        "classes",
        "classes-per-client consecutive classes per client, each class evenly over the"
        " clients that have it",
        "Wang, Shi & Chang 2023 (FedTAN), Appendix D",
        split_classes,
        by_class=True,
    ),
    PartitionInfo(
        "domain",
        "one domain per client, domain-share of each domain evenly over its clients",
        "Li et al. 2021 (FedBN)",
        split_domain,
        by_group=True,
    ),
    PartitionInfo(
        "natural",
        "a client per group of the data (domain, city, writer)",
        "Caldas et al. 2018 (LEAF); FixBN's Cityscapes",
        split_natural,
        by_group=True,
    ),
)

PARTITIONS: dict[str, PartitionInfo] = {info.name: info for info in _INFOS}


def partition_test_set(
    train_partition: Sequence[Indices],
    train_labels: Indices,
    test_labels: Indices,
    seed: int,
    train_groups: Indices | None = None,
    test_groups: Indices | None = None,
) -> list[Indices]:
    """Return each client's test examples, a share of each class as in its training.

    The rule does not depend on the kind of split. If the data set has groups, each
    class in each group counts as a class, so clients of one domain get test examples of
    that domain. The test examples of a class are split in proportion to the clients'
    training counts, by largest remainder (ties go to the lower partition id); the seed
    determines the examples of a client. A test example goes to exactly one client, or
    to no client if none has its class in training. A client with few training examples
    may get no test example.

    Args:
        train_partition: indices into ``train_labels`` by partition id.
        train_labels: class of each training example, int64.
        test_labels: class of each test example, int64.
        seed: the run's seed.
        train_groups: group of each training example, int64, or None without groups.
        test_groups: group of each test example, int64, or None without groups.
    """
    # A cell is a class. If the data have groups, a cell is a class within a group.
    train_cells, test_cells = np.asarray(train_labels), np.asarray(test_labels)
    num_cells = _highest(train_cells, test_cells) + 1
    if train_groups is not None and test_groups is not None:
        train_cells = train_cells + num_cells * train_groups
        test_cells = test_cells + num_cells * test_groups
        num_cells = _highest(train_cells, test_cells) + 1
    counts = partition_counts(train_partition, train_cells, num_cells)
    # Collect the test examples of all cells in which a client trains, and the client
    # that gets each of them.
    given, owners = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    clients = np.arange(len(train_partition))
    for cell, of_clients in enumerate(counts.T):
        examples = np.flatnonzero(test_cells == cell).astype(np.int64)
        total = int(of_clients.sum())
        if not total:
            continue
        # Each client gets test examples in proportion to its training examples in this
        # cell. The examples left over by rounding go to the largest remainders. All
        # numbers are integers, so every machine sees the same ties.
        sizes, remainders = np.divmod(of_clients * len(examples), total)
        left = len(examples) - int(sizes.sum())
        sizes[np.argsort(-remainders, kind="stable")[:left]] += 1
        # Keep the word "deal-test", because it is part of the seed: another word would
        # change every split.
        given.append(numpy_generator(seed, "deal-test", cell).permutation(examples))
        owners.append(np.repeat(clients, sizes))
    # Sort all examples once by client and then by example, because a loop over
    # thousands of clients and cells is slow.
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
    # Count all pairs of client and class in one call, because a loop over thousands of
    # clients is slow.
    clients = np.repeat(np.arange(len(partition)), [len(part) for part in partition])
    pairs = clients * num_classes + labels[np.concatenate(partition)]
    counts = np.bincount(pairs, minlength=len(partition) * num_classes)
    return counts.reshape(len(partition), -1).astype(np.int64)

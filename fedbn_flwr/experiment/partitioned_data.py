"""The data of a run and their split over the clients: the same on every node."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedbn_flwr.data import PARTITIONS, Augment, Dataset, Subset, load_dataset, split_dataset
from fedbn_flwr.experiment.config import Config
from fedbn_flwr.experiment.setup import image_shape, pick_device

__all__ = ["PartitionedData", "count_clients", "partitioned_data"]

DEFAULT_CLIENTS = 5  # in process, where num-clients=0 finds no federation to count


@dataclass(frozen=True)
class PartitionedData:
    """The data of a run and its split: training and test examples of each client by index."""

    dataset: Dataset
    train: tuple[np.ndarray[Any, np.dtype[np.int64]], ...]
    test: tuple[np.ndarray[Any, np.dtype[np.int64]], ...]
    augment: Augment | None

    def train_view(self, partition_id: int | None = None) -> Subset:
        """Return a client's training data; of all clients together without a partition id."""
        own = np.concatenate(self.train) if partition_id is None else self.train[partition_id]
        return Subset(self.dataset.train, own, mean=self.dataset.mean, std=self.dataset.std, augment=self.augment)

    def test_view(self, partition_id: int | None = None) -> Subset:
        """Return a client's own test data, or the whole test set."""
        own = None if partition_id is None else self.test[partition_id]
        return Subset(self.dataset.test, own, mean=self.dataset.mean, std=self.dataset.std)

    def domain_views(self) -> dict[str, Subset]:
        """Return the test set of each domain (group) that has one, by name; empty where the data have no groups."""
        data, groups = self.dataset, self.dataset.test.groups
        if groups is None:
            return {}
        found = {name: torch.nonzero(groups == index).flatten() for index, name in enumerate(data.group_names)}
        return {name: Subset(data.test, own, mean=data.mean, std=data.std) for name, own in found.items() if len(own)}

    def domain_of(self, partition_id: int) -> str | None:
        """Return the domain all of a client's test data come from; None where there is no such."""
        groups = self.test_view(partition_id).groups
        own = [] if groups is None else torch.unique(groups).tolist()
        return self.dataset.group_names[own[0]] if len(own) == 1 else None


def count_clients(config: Config) -> int:
    """Return ``num_clients`` or, where it is not set, the groups of a split by group and 5 for the others.

    Raises:
        DataError: the data is not there.
    """
    if config.num_clients or not PARTITIONS[config.partition].by_group:
        return config.num_clients or DEFAULT_CLIENTS
    groups = _dataset(config).train.groups
    return DEFAULT_CLIENTS if groups is None else len(torch.unique(groups))  # no groups: the split says what is wrong


def partitioned_data(config: Config, num_clients: int) -> PartitionedData:
    """Load the data and split it over ``num_clients``.

    Raises:
        DataError: the data is not there, or cannot be split as asked.
    """
    # Only what the data and their split depend on: runs that differ in anything else share them.
    return _partitioned(num_clients, _dataset(config), *(getattr(config, key) for key in _SPLIT_KEYS))


def _dataset(config: Config) -> Dataset:
    channels, height, _ = image_shape(config)
    return load_dataset(config.dataset, config.data_dir, channels, height, pick_device(config.device))


_SPLIT_KEYS = (
    *("augment", "seed", "partition", "partition_alpha"),
    *("classes_per_client", "num_shards", "shards_per_client", "domain_share"),
)


# A pure function of its arguments, kept for the last few: Flower calls client_fn for every message, and all clients of
# a process share one copy of the images.
@functools.lru_cache(maxsize=4)
def _partitioned(num_clients: int, data: Dataset, *values: Any) -> PartitionedData:
    of = dict(zip(_SPLIT_KEYS, values, strict=True))
    train, test = split_dataset(
        data,
        of["partition"],
        num_clients,
        seed=of["seed"],
        alpha=of["partition_alpha"],
        classes_per_client=of["classes_per_client"],
        num_shards=of["num_shards"],
        shards_per_client=of["shards_per_client"],
        domain_share=of["domain_share"],
    )
    return PartitionedData(data, tuple(train), tuple(test), Augment.parse(of["augment"]))

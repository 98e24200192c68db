"""The data of a run and its split over the clients, the same on every node."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedbn_flwr.errors import ConfigError, DataError, unknown_name
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.data import (
    PARTITIONS,
    Augment,
    Dataset,
    Samples,
    Subset,
    listed,
    load_dataset,
    split_dataset,
    split_off,
)
from fedbn_flwr.lab.data.augment import RESIZED_CROP
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.setup import pick_device
from fedbn_flwr.seeds import derive_seed

__all__ = [
    "PartitionedData",
    "count_clients",
    "domain_test",
    "load_data",
    "partitioned_data",
    "put_aside",
    "whole_data",
]

DEFAULT_CLIENTS = 5  # of num-clients=0 in process, which has no federation to count
_SPLIT_KEYS = (
    "augment",
    "seed",
    "validation_share",
    "partition",
    "partition_alpha",
    "classes_per_client",
    "shards_per_client",
    "domain_share",
    "held_out_clients",
)


@dataclass(frozen=True)
class PartitionedData:
    """The data of a run and its split: indices of each client's training, test and
    validation examples.
    """

    dataset: Dataset
    train: tuple[Indices, ...]
    test: tuple[Indices, ...]
    augment: Augment | None
    validation: tuple[Indices, ...] = ()
    held_out_names: tuple[str, ...] = ()
    # training and test examples of each held-out client
    held_out: tuple[tuple[Indices, Indices], ...] = ()

    def held_out_views(self, at: int) -> tuple[Subset, Subset]:
        """Return the inputs, of which no target is used, and the test data of a
        held-out client.
        """
        train, test = self.held_out[at]
        return self._view(self.dataset.train, train), self._view(
            self.dataset.test, test
        )

    def train_view(self, partition_id: int | None = None) -> Subset:
        """Return a client's training data; without a partition id that of all clients
        together.
        """
        indices = (
            np.concatenate(self.train)
            if partition_id is None
            else self.train[partition_id]
        )
        return self._view(self.dataset.train, indices, self.augment)

    def test_view(self, partition_id: int | None = None) -> Subset:
        """Return a client's own test data; without a partition id all test data but
        those of held-out clients.
        """
        return self._view(
            self.dataset.test,
            self._tests() if partition_id is None else self.test[partition_id],
        )

    def _view(
        self, examples: Samples, indices: Any, augment: Augment | None = None
    ) -> Subset:
        return Subset(
            examples,
            indices,
            mean=self.dataset.mean,
            std=self.dataset.std,
            augment=augment,
        )

    def _tests(self) -> Indices | None:
        """Return the test examples of no held-out client; None = all."""
        if not self.held_out:
            return None
        apart = np.concatenate([test for _, test in self.held_out])
        return np.setdiff1d(np.arange(len(self.dataset.test)), apart)

    def validation_view(self, partition_id: int | None = None) -> Subset:
        """Return a client's validation data, which it does not train on; without a
        partition id that of all clients.

        They are a part of the training examples, and not augmented. Empty if
        ``validation-share`` is 0.
        """
        parts = (
            self.validation
            if partition_id is None
            else self.validation[partition_id : partition_id + 1]
        )
        return self._view(
            self.dataset.train, np.concatenate([np.empty(0, np.int64), *parts])
        )

    def domain_views(self) -> dict[str, Subset]:
        """Return the test set of each domain (group) by name; empty if the data have no
        groups.
        """
        groups = self.dataset.test.groups
        if groups is None:
            return {}
        tests = self._tests()
        known = torch.ones_like(groups, dtype=torch.bool)
        if tests is not None:
            known = torch.zeros_like(known).index_fill_(
                0, torch.as_tensor(tests).to(groups.device), True
            )
        views = {}
        for number, name in enumerate(self.dataset.group_names):
            indices = torch.nonzero((groups == number) & known).flatten()
            if len(indices):
                views[name] = self._view(self.dataset.test, indices)
        return views

    def domain_of(self, partition_id: int) -> str | None:
        """Return the domain of a client's test data; None if they come from several
        domains or none.

        None, too, for an unknown client.
        """
        if partition_id >= len(self.test):
            return None
        groups = self.test_view(partition_id).groups
        numbers = [] if groups is None else torch.unique(groups).tolist()
        return self.dataset.group_names[numbers[0]] if len(numbers) == 1 else None


def domain_test(domain: str) -> str:
    """Return the name of a client's test on a domain, without the comma that separates
    the names of tests.
    """
    return f"domain-{domain.replace(',', ';')}"


def count_clients(config: Config) -> int:
    """Return ``num_clients``; if it is 0, the groups that are not held out for a split
    by group, 5 for other splits.

    Raises:
        DataError: the data is missing.
    """
    if config.num_clients or not PARTITIONS[data_of(config).split_name].by_group:
        return config.num_clients or DEFAULT_CLIENTS
    data = load_data(config)
    if data.train.groups is None:
        return DEFAULT_CLIENTS  # the split raises
    apart = len(_held_out(config.held_out_clients, data_of(config).split_name, data))
    return max(1, len(torch.unique(data.train.groups)) - apart)


def partitioned_data(
    config: Config, num_clients: int, shape: tuple[int, ...] = ()
) -> PartitionedData:
    """Return the data of a run, split over ``num_clients``.

    Args:
        config: the settings of the run.
        num_clients: over which the data are split.
        shape: of images, (C, H, W); () = that of the model.

    Raises:
        DataError: the data is missing, or it cannot be split in this way.
    """
    # Runs with the same values of these keys share the data and its split.
    values = [getattr(config, key) for key in _SPLIT_KEYS]
    return _partitioned(num_clients, load_data(config, shape), *values)


def whole_data(config: Config, data: Dataset, client: int) -> PartitionedData:
    """Return all data for one client, whose number seeds the draw of its validation
    examples.

    Args:
        config: the settings of the run.
        data: the data of one node.
        client: partition id.
    """
    return _whole(data, client, config.augment, config.seed, config.validation_share)


@functools.lru_cache(maxsize=4)
def _whole(
    data: Dataset, client: int, augment: str, seed: int, share: float
) -> PartitionedData:
    train, test = (
        np.arange(len(samples), dtype=np.int64) for samples in (data.train, data.test)
    )
    return _prepared(data, [train], [test], [client], augment, seed, share)


def load_data(config: Config, shape: tuple[int, ...] = ()) -> Dataset:
    """Return the data of a run; images in a shape (C, H, W), () = that of the model.

    Raises:
        DataError: the data is missing, or only the nodes have it.
    """
    if data_of(config).on_nodes:
        raise DataError(
            f"dataset={config.dataset!r} has no path: only the nodes have the data,"
            " each at the data-path of its node config, and tests of the server need"
            " some. Use eval-on=personal-own over a network; or name the path."
        )
    shape, augment = shape or data_of(config).shape, Augment.parse(config.augment)
    channels, size = shape[:2] if len(shape) == 3 else (None, None)
    return load_dataset(
        data_of(config).info,
        config.data_dir,
        channels,
        size,
        pick_device(config.device),
        originals=augment is not None and RESIZED_CROP in augment.each,
    )


# Cached, because Flower calls client_fn for every message; all clients of a process
# share one copy of the images.
@functools.lru_cache(maxsize=4)
def _partitioned(num_clients: int, data: Dataset, *values: Any) -> PartitionedData:
    options = dict(zip(_SPLIT_KEYS, values, strict=True))
    names = (
        "augment",
        "partition",
        "partition_alpha",
        "validation_share",
        "held_out_clients",
    )
    augment, partition, alpha, share, held_out_clients = (
        options.pop(key) for key in names
    )
    apart = _held_out(held_out_clients, partition, data)
    train, test = split_dataset(
        data, partition, num_clients + len(apart), alpha=alpha, **options
    )
    places = [at % len(train) for at in apart.values()]  # -1 is the last client
    held_out = tuple((train[at], test[at]) for at in places)
    train = [part for at, part in enumerate(train) if at not in places]
    test = [part for at, part in enumerate(test) if at not in places]
    clients, seed = range(num_clients), options["seed"]
    return _prepared(
        data, train, test, clients, augment, seed, share, tuple(apart), held_out
    )


def _prepared(
    data: Dataset,
    train: list[Indices],
    test: list[Indices],
    clients: Sequence[int],
    augment: str,
    seed: int,
    share: float,
    names: tuple[str, ...] = (),
    held_out: tuple[tuple[Indices, Indices], ...] = (),
) -> PartitionedData:
    """Return the data of these clients: validation examples put aside."""
    validation: list[Indices] = []
    if share:
        pairs = []
        for client, part in zip(clients, train, strict=True):
            pairs.append(
                put_aside(
                    data.train, part, share, derive_seed(seed, "validation", client)
                )
            )
        train, validation = [rest for rest, _ in pairs], [aside for _, aside in pairs]
        if not any(map(len, validation)):
            raise DataError(
                f"validation-share={share} gives no client a validation example: the"
                f" largest of {len(clients)} has {max(map(len, train))} training"
                " examples. Use a larger share or fewer clients."
            )
    return PartitionedData(
        data,
        tuple(train),
        tuple(test),
        Augment.parse(augment),
        tuple(validation),
        names,
        held_out,
    )


def _held_out(text: str, partition: str, data: Dataset) -> dict[str, int]:
    """Return the held-out clients of the config: their names, and their places among
    all clients, -1 for the last.

    Raises:
        ConfigError: a name is unknown, or the split does not give each client a group,
            or no client is left.
    """
    text = unicodedata.normalize("NFC", text).strip()  # as names of clients are
    natural, groups = partition == "natural", list[str]()
    if natural and data.train.groups is not None:
        groups = [
            data.group_names[number]
            for number in torch.unique(data.train.groups).tolist()
        ]
    if text.isdecimal() and text not in groups:
        count = int(text)
        last = (
            groups[max(0, len(groups) - count) :]
            if natural
            else [f"held-out-{at}" for at in range(count)]
        )
        held_out = {name: at - count for at, name in enumerate(last)}
    else:
        wanted = [text] if text in groups else listed(text)
        for name in wanted:
            if not natural:
                raise ConfigError(
                    f"held-out-clients={text!r} names clients, which"
                    f" partition={partition} has not. Use partition=natural, or a"
                    " number of clients."
                )
            if name not in groups:
                raise unknown_name("held-out client", name, groups)
        held_out = {name: groups.index(name) for name in wanted}
    if held_out and len(held_out) == len(groups):
        raise ConfigError(
            f"held-out-clients={text!r} leaves none of the {len(groups)} clients to"
            " train."
        )
    return held_out


def put_aside(
    samples: Samples, indices: Indices, share: float, seed: int
) -> tuple[Indices, Indices]:
    """Return a client's training and validation examples, given all of its examples."""
    units = None if samples.units is None else samples.units.cpu().numpy()
    return split_off(indices, samples.labels.cpu().numpy(), share, seed, units)

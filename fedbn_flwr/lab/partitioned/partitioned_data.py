"""The data of a run and its split over the clients, the same on every node."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from fedbn_flwr.errors import ConfigError, DataError, unknown_name
from fedbn_flwr.lab.config import CENTRALIZED, Config, data_of, listed
from fedbn_flwr.lab.data import (
    Augment,
    Dataset,
    Samples,
    Subset,
    load_dataset,
    partition_info,
    split_dataset,
    split_off,
)
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.objects_of_config import pick_device
from fedbn_flwr.training.randomness import derive_seed

# number of clients in process if num-clients=0 and no federation is there to count
DEFAULT_CLIENTS = 5


@dataclass(frozen=True)
class _SplitKeys:
    """The values of the keys that determine a split. Equal values share one split."""

    partition: str
    partition_alpha: float
    classes_per_client: int
    domain_share: float
    held_out_clients: str
    validation_share: float
    seed: int


@dataclass(frozen=True)
class PartitionedData:
    """The data of a run, and the indices of each client's examples.

    Attributes:
        dataset: all training and test examples.
        train: indices of the training examples by partition id.
        test: indices of the test examples by partition id.
        augment: the changes of training images, or None without changes.
        validation: indices of the validation examples by partition id; () if there are
            none.
        held_out_names: names of the clients that take no part in the training.
        held_out: indices of the training and test examples of each held-out client.
    """

    dataset: Dataset
    train: tuple[Indices, ...]
    test: tuple[Indices, ...]
    augment: Augment | None
    validation: tuple[Indices, ...] = ()
    held_out_names: tuple[str, ...] = ()
    held_out: tuple[tuple[Indices, Indices], ...] = ()

    def held_out_views(self, at: int) -> tuple[Subset, Subset]:
        """Return the training and test data of a held-out client.

        Of the training data, only the inputs are used.
        """
        train, test = self.held_out[at]
        inputs = self._view(self.dataset.train, train)
        return inputs, self._view(self.dataset.test, test)

    def train_view(self, partition_id: int | None = None) -> Subset:
        """Return a client's training data, or by default the data of all clients."""
        if partition_id is None:
            indices = np.concatenate(self.train)
        else:
            indices = self.train[partition_id]
        return self._view(self.dataset.train, indices, self.augment)

    def test_view(self, partition_id: int | None = None) -> Subset:
        """Return a client's own test data, or by default the data of all clients.

        Test data of held-out clients are left out.
        """
        if partition_id is None:
            indices = self._tests()
        else:
            indices = self.test[partition_id]
        return self._view(self.dataset.test, indices)

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
        """Return the test examples of the clients that train, or None for all examples.

        The test examples of held-out clients are left out.
        """
        if not self.held_out:
            return None
        apart = np.concatenate([test for _, test in self.held_out])
        return np.setdiff1d(np.arange(len(self.dataset.test)), apart)

    def validation_view(self, partition_id: int | None = None) -> Subset:
        """Return a client's validation data, or by default the data of all clients.

        They are a part of the training examples. No client trains on them, and they are
        not augmented. They are empty if ``validation-share`` is 0.
        """
        parts = self.validation
        if partition_id is not None:
            parts = parts[partition_id : partition_id + 1]
        # Add an empty array, because concatenate needs at least one, and there may be
        # no validation examples.
        indices = np.concatenate([np.empty(0, np.int64), *parts])
        return self._view(self.dataset.train, indices)

    def domain_views(self) -> dict[str, Subset]:
        """Return the test set of each domain (group) by name, or {} without groups."""
        groups = self.dataset.test.groups
        if groups is None:
            return {}
        # Leave out domains that only held-out clients have, because their examples do
        # not test the clients' model.
        tests = self._tests()
        known = torch.ones_like(groups, dtype=torch.bool)
        if tests is not None:
            known = torch.zeros_like(known)
            known[torch.as_tensor(tests).to(groups.device)] = True
        views = {}
        for number, name in enumerate(self.dataset.group_names):
            indices = torch.nonzero((groups == number) & known).flatten()
            if len(indices):
                views[name] = self._view(self.dataset.test, indices)
        return views

    def domain_of(self, partition_id: int) -> str | None:
        """Return the one domain of a client's test data.

        It is None if the test data have several domains or none.
        """
        # A node's number may be higher than the number of clients of the split.
        if partition_id >= len(self.test):
            return None
        groups = self.test_view(partition_id).groups
        if groups is None:
            return None
        numbers = torch.unique(groups).tolist()
        return self.dataset.group_names[numbers[0]] if len(numbers) == 1 else None


def domain_test(domain: str) -> str:
    """Return the name of the test on a domain, for messages to clients."""
    # Replace commas, because commas separate the names of tests in a message.
    return f"domain-{domain.replace(',', ';')}"


def count_clients(config: Config) -> int:
    """Return the number of clients of the split of a run in process.

    If ``num_clients`` is not set, a split by group has a client for each group that is
    not held out. Other splits have ``DEFAULT_CLIENTS``. ``federation_size`` is the
    number of clients that train.

    Raises:
        ConfigError: ``held-out-clients`` does not fit the data.
        DataError: the data is missing.
    """
    if config.num_clients:
        return config.num_clients
    split = data_of(config).split_name
    if not partition_info(split).by_group:
        return DEFAULT_CLIENTS
    data = load_data(config)
    # Return any number, because the split by group then raises an error.
    if data.train.groups is None:
        return DEFAULT_CLIENTS
    apart, _ = _held_out(config.held_out_clients, split, data)
    return max(1, len(torch.unique(data.train.groups)) - len(apart))


def federation_size(config: Config) -> int:
    """Return the number of clients of the federation; 0 takes all nodes.

    ``strategy=centralized`` is a federation of one client, which has the data of all
    clients of the split.
    """
    return 1 if config.strategy == CENTRALIZED else config.num_clients


def partitioned_data(
    config: Config, num_clients: int, shape: tuple[int, ...] = ()
) -> PartitionedData:
    """Return the data of a run, split over ``num_clients``.

    With ``strategy=centralized``, one client has the parts of all clients.

    Args:
        config: the settings of the run.
        num_clients: number of clients of the split.
        shape: shape of images, (C, H, W); by default, the shape of the model.

    Raises:
        DataError: the data is missing, or it cannot be split in this way.
    """
    # Cache the split by the keys that determine it and by the data. ``load_data``
    # returns the same object for the same data, so this object can be part of the
    # cache's key.
    keys = [getattr(config, field.name) for field in fields(_SplitKeys)]
    data, augment = load_data(config, shape), data_of(config).augmentation
    pooled = config.strategy == CENTRALIZED
    # A node counts only the nodes, and the node of a pooled run is alone.
    if pooled:
        num_clients = count_clients(config)
    return _partitioned(num_clients, data, augment, _SplitKeys(*keys), pooled)


def whole_data(config: Config, data: Dataset, client: int) -> PartitionedData:
    """Return all data of a node for its one client.

    Args:
        config: the settings of the run.
        data: the data of one node.
        client: partition id; it seeds the draw of the validation examples.
    """
    augment = data_of(config).augmentation
    return _whole(data, client, augment, config.seed, config.validation_share)


@functools.lru_cache(maxsize=4)
def _whole(
    data: Dataset, client: int, augment: Augment | None, seed: int, share: float
) -> PartitionedData:
    everything = np.arange(len(data.train), dtype=np.int64)
    train, validation = _validated(data, [everything], [client], seed, share)
    return PartitionedData(
        data,
        train,
        test=(np.arange(len(data.test), dtype=np.int64),),
        augment=augment,
        validation=validation,
    )


def load_data(config: Config, shape: tuple[int, ...] = ()) -> Dataset:
    """Return the training and test data of a run.

    Args:
        config: the settings of the run.
        shape: shape of images, (C, H, W); by default, the shape of the model.

    Raises:
        DataError: the data is missing, or only the nodes have it.
    """
    if data_of(config).on_nodes:
        raise DataError(
            f"dataset={config.dataset!r} has no path: only the nodes have the data,"
            " each at the data-path of its node config, but tests of the server need"
            " data. Use eval-on=personal-own over a network, or set the path."
        )
    shape = shape or data_of(config).shape
    # Only images (three dimensions) are converted to channels and a size. Rows and
    # signals are not changed.
    channels, size = shape[:2] if len(shape) == 3 else (None, None)
    return load_dataset(
        data_of(config).info,
        config.data_dir,
        channels,
        size,
        pick_device(config.device),
    )


# Cached, because Flower calls client_fn for every message. All clients of a process
# thus share one copy of the images.
@functools.lru_cache(maxsize=4)
def _partitioned(
    num_clients: int,
    data: Dataset,
    augment: Augment | None,
    keys: _SplitKeys,
    pooled: bool,
) -> PartitionedData:
    # Split the data over all clients before some clients are held out, so that held-out
    # clients are of the same kind as the others.
    apart, of_tests = _held_out(keys.held_out_clients, keys.partition, data)
    train, test = split_dataset(
        data,
        keys.partition,
        num_clients + len(apart),
        seed=keys.seed,
        alpha=keys.partition_alpha,
        classes_per_client=keys.classes_per_client,
        domain_share=keys.domain_share,
    )
    # Convert negative places: -1 means the last client.
    places = [at % len(train) for at in apart.values()]
    held_out = [(train[at], test[at]) for at in places]
    held_out += [(np.empty(0, np.int64), rows) for rows in of_tests.values()]
    # Number the remaining clients from 0, without gaps.
    train = [part for at, part in enumerate(train) if at not in places]
    test = [part for at, part in enumerate(test) if at not in places]
    rest, validation = _validated(
        data, train, range(num_clients), keys.seed, keys.validation_share
    )
    if validation and not any(map(len, validation)):
        raise DataError(
            f"validation-share={keys.validation_share} gives no client a validation"
            f" example: the largest of {num_clients} has {max(map(len, train))} training"
            " examples. Use a larger share or fewer clients."
        )
    if pooled:
        rest, validation = _pooled(rest), _pooled(validation)
        test = [*_pooled(test)]
    return PartitionedData(
        data,
        rest,
        tuple(test),
        augment,
        validation,
        held_out_names=(*apart, *of_tests),
        held_out=tuple(held_out),
    )


def _pooled(parts: Sequence[Indices]) -> tuple[Indices, ...]:
    """Return the parts of all clients as the part of one client, or () if none."""
    return (np.sort(np.concatenate(parts)),) if parts else ()


def _validated(
    data: Dataset,
    train: Sequence[Indices],
    clients: Sequence[int],
    seed: int,
    share: float,
) -> tuple[tuple[Indices, ...], tuple[Indices, ...]]:
    """Return the training and the validation examples of each client.

    A client with too few examples has none for validation.
    """
    if not share:
        return tuple(train), ()
    rests, validation = list[Indices](), list[Indices]()
    for client, part in zip(clients, train, strict=True):
        seed_of_client = derive_seed(seed, "validation", client)
        rest, aside = put_aside(data.train, part, share, seed_of_client)
        rests.append(rest)
        validation.append(aside)
    return tuple(rests), tuple(validation)


def sites_of_tests(data: Dataset) -> dict[str, Indices]:
    """Return the test examples of each group without training examples, by name."""
    groups, tests = data.train.groups, data.test.groups
    if groups is None or tests is None:
        return {}
    trained, of_tests = set(torch.unique(groups).tolist()), tests.cpu().numpy()
    return {
        name: np.flatnonzero(of_tests == number)
        for number, name in enumerate(data.group_names)
        if number not in trained
    }


def _held_out(
    text: str, partition: str, data: Dataset
) -> tuple[dict[str, int], dict[str, Indices]]:
    """Return the held-out clients with a place, and the held-out sites without one.

    A place is the position in the split over all clients; -1 means the last client. A
    held-out site without training examples has no place, because it is no client of the
    split. It has the indices of its test examples instead.

    Raises:
        ConfigError: a name is unknown, a number is also a name, the split does not give
            each client a group, or no client is left.
    """
    # Only clients of ``natural`` have names: the names of the groups. Compare names in
    # one form of Unicode, because a file system may use another form.
    text = unicodedata.normalize("NFC", text).strip()
    natural, groups = partition == "natural", list[str]()
    sites, of_tests = dict[str, Indices](), dict[str, Indices]()
    if natural and data.train.groups is not None:
        sites = sites_of_tests(data)
        for number in torch.unique(data.train.groups).tolist():
            groups.append(data.group_names[number])
    named = text in (*groups, *sites)
    # A number N means the last N clients.
    if text.isdecimal():
        if named:
            raise ConfigError(
                f"held-out-clients={text!r} is a number of clients, and a client has"
                f" this name. For this client write '{text},' with the comma. For the"
                " last clients write their names."
            )
        count = int(text)
        if natural:
            last = groups[max(0, len(groups) - count) :]
        else:
            last = [f"held-out-{at}" for at in range(count)]
        held_out = {name: at - count for at, name in enumerate(last)}
    # Otherwise the text is a comma list of names, or one name that contains a comma.
    else:
        wanted = [text] if named else listed(text)
        for name in wanted:
            if not natural:
                raise ConfigError(
                    f"held-out-clients={text!r} names clients, but"
                    f" partition={partition} has no names. Use partition=natural, or a"
                    " number of clients."
                )
            if name not in groups and name not in sites:
                raise unknown_name("held-out client", name, [*groups, *sites])
        held_out = {name: groups.index(name) for name in wanted if name in groups}
        # Skip a site without test examples.
        for name in wanted:
            if name in sites and len(sites[name]):
                of_tests[name] = sites[name]
    if held_out and len(held_out) == len(groups):
        raise ConfigError(
            f"held-out-clients={text!r} leaves none of the {len(groups)} clients to"
            " train."
        )
    return held_out, of_tests


def put_aside(
    samples: Samples, indices: Indices, share: float, seed: int
) -> tuple[Indices, Indices]:
    """Divide a client's examples into training and validation examples.

    Args:
        samples: the training samples of all clients.
        indices: the client's examples.
        share: the share of the validation examples.
        seed: seed of the draw.
    """
    units = None if samples.units is None else samples.units.cpu().numpy()
    return split_off(indices, samples.labels.cpu().numpy(), share, seed, units)

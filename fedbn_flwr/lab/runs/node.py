"""The client of a node, made from its Flower context."""

from __future__ import annotations

import difflib
import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Context

from fedbn_flwr.client.kept import state_dir
from fedbn_flwr.client.model_door import BuildModel
from fedbn_flwr.client.torch_client import TorchClient
from fedbn_flwr.compat.flower import on_network_node
from fedbn_flwr.errors import ABOUT_THE_RUN, ConfigError, DataError, unknown_name
from fedbn_flwr.lab.config import (
    STATE_IN_OUT,
    Config,
    data_of,
    method_of,
    state_in_out,
)
from fedbn_flwr.lab.data import Subset, is_own, load_dataset
from fedbn_flwr.lab.objects_of_config import (
    local_training,
    pick_device,
    reuses_models,
    training_model,
)
from fedbn_flwr.lab.partitioned.partitioned_data import (
    PartitionedData,
    domain_test,
    load_data,
    partitioned_data,
    whole_data,
)
from fedbn_flwr.machine import keep_freed_memory
from fedbn_flwr.messages.protocol import (
    DATA_PATH,
    NODE_KEYS,
    NUM_PARTITIONS,
    PARTITION_ID,
    STATE_DIR,
    VALIDATION,
    num_partitions_of,
    partition_of,
    site_name_of,
)
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.tasks import Task

if TYPE_CHECKING:
    from fedbn_flwr.lab.runs.check_start import CheckedConfig


def client_fn(context: Context) -> TorchClient:
    """Return a node's client, made from its Flower context.

    A node with a ``data-path`` in its config trains and tests on the data there, not on
    a partition.

    Raises:
        ConfigError: the node config has neither ``partition-id`` and ``num-partitions``
            nor ``data-path``; or it has an impossible value, or a key that looks like a
            misspelt key.
        DataError: the node's own data cannot be used, or they lack a test set in
            ``eval-on``.
    """
    site_name_of(context)  # raises an error if it is not a name
    for key in context.node_config:
        if key in NODE_KEYS:
            continue
        # Refuse only keys that look like a misspelt key, because a node may serve other
        # apps with keys of their own.
        if difflib.get_close_matches(key.replace("_", "-"), NODE_KEYS, cutoff=0.9):
            raise unknown_name("key of the node's config", key, NODE_KEYS)
    return _run_clients(tuple(context.run_config.items())).client(context)


# Cached, because Flower calls client_fn for every message.
@functools.lru_cache(maxsize=4)
def _run_clients(items: tuple[tuple[str, Any], ...]) -> RunClients:
    """Return the ``RunClients`` of a run config, given as (key, value) pairs.

    Calls with an equal run config return the same object.
    """
    if on_network_node():  # elsewhere, the process may be a user's
        keep_freed_memory()
    config = Config.make(dict(items), complete=True)
    return RunClients(config, functools.partial(training_model, config))


class RunClients:
    """Makes the clients of one run.

    The nodes of a process share the config, the data and the models.

    Args:
        config: the settings.
        build: builds the model, ready to train.

    Attributes:
        split: returns the data, split over a number of clients.
    """

    def __init__(self, config: Config, build: BuildModel) -> None:
        self._config = config
        self._build = build
        self._tests = method_of(config).tests
        self._by_function = data_of(config).by_function
        self._settings = local_training(config)
        self._state_in_out = state_in_out(config)
        # Cache a few splits, because nodes of one process may have different numbers of
        # partitions.
        split = functools.partial(partitioned_data, config)
        self.split = functools.lru_cache(maxsize=4)(split)

    @classmethod
    def of(cls, checked: CheckedConfig) -> RunClients:
        """Return the ``RunClients`` of a run that this process has checked."""
        config = checked.config  # the server uses the checked model itself
        return cls(config, functools.partial(training_model, config))

    def client(self, context: Context) -> TorchClient:
        """Return a node's client, see ``client_fn``."""
        config = self._config
        torch.set_num_threads(config.torch_threads)
        train, tests = self._node_data(context)
        return TorchClient(
            self._build,
            train,
            tests,
            self._settings,
            context=context,
            seed=config.seed,
            task=self._task,
            state_dir=self._state_dir(context),
            reuse_model=reuses_models(config),
        )

    @functools.cached_property
    def _task(self) -> Task:
        # Computed at the first use, because it reads own data, and the client must
        # report their errors.
        return data_of(self._config).test_task

    def _state_dir(self, context: Context) -> Path | None:
        """Return a node's state folder.

        For ``state-dir=out``, the folder is in the run's output folder.
        """
        of_run = self._config.state_dir
        own = str(context.node_config.get(STATE_DIR, ""))
        if (own or of_run) == STATE_IN_OUT:
            return self._state_in_out
        return state_dir(context, of_run)

    def num_examples(self, context: Context) -> int:
        """Return the number of training examples of a node with a partition."""
        client, num_clients = _part(context)
        return len(self.split(num_clients).train[client])

    def _node_data(self, context: Context) -> tuple[Subset, dict[str, Subset]]:
        """Return a node's training data and its test sets.

        The node's validation data, if any, are also in a test set.
        """
        config = self._config
        of_site = self._by_function and on_network_node()
        if DATA_PATH in context.node_config or of_site:
            # The node has data of its own, all for its one client.
            shared = {*self._tests} & {"personal-global", "personal-domains"}
            if (data_of(config).on_nodes or of_site) and shared:
                raise DataError(
                    f"eval-on={','.join(sorted(shared))} needs a test set that all"
                    " nodes share, but a node with the data of a site or with a"
                    " data-path has only its own. Use eval-on=personal-own.",
                    code=ABOUT_THE_RUN,
                )
            split, client = _own_data(config, context)[0], 0
            tests = {"own": split.test_view(0)}
        else:
            # The node uses its partition of the data that all nodes have.
            client, num_clients = _part(context)
            split = self.split(num_clients)
            tests = {"own": split.test_view(client), "global": split.test_view()}
            if "personal-domains" in self._tests:
                for name, view in split.domain_views().items():
                    tests[domain_test(name)] = view
        if config.validation_share:
            tests[VALIDATION] = split.validation_view(client)
        return split.train_view(client), tests


def _part(context: Context) -> tuple[int, int]:
    """Return the number of a node's partition, and the number of partitions.

    Raises:
        ConfigError: the node's config lacks one of the numbers, or the partition does
            not exist. The text does not name the node, so that all nodes with this
            fault raise an equal error. An equal error of all nodes ends the run. The
            server adds the names of the nodes.
    """
    node = context.node_config
    for key in (PARTITION_ID, NUM_PARTITIONS):
        if key not in node:
            raise ConfigError(
                f"{str(key)!r} is missing from the node's config. Start the SuperNode"
                " with --node-config 'partition-id=0 num-partitions=3' (its own number"
                " and the number of nodes), or with --node-config 'partition-id=0"
                ' data-path="/its/own/data"\'.'
            )
    client, num_clients = partition_of(context), num_partitions_of(context)
    if client is None or not num_clients or client >= num_clients:
        raise ConfigError(
            f"partition-id={node[PARTITION_ID]!r}"
            f" num-partitions={node[NUM_PARTITIONS]!r} in the node's config: use a"
            " whole number from 1 for num-partitions, and a smaller number from 0 for"
            " partition-id"
        )
    return client, num_clients


def _data_of_site(config: Config, context: Context) -> PartitionedData:
    """Return the data that the run's function gives for a node.

    The function is called with the node's ``data-path``, or else its partition id.

    Raises:
        DataError: the function fails, or its data do not fit the run's model.
    """
    # Import here, because own_info imports the readers of arrays and images.
    from fedbn_flwr.lab.data import own_info

    client = partition_of(context) or 0
    site = os.path.expanduser(str(context.node_config.get(DATA_PATH, "")))
    if not site:
        # ``_part`` raises an error if the partition id is missing or impossible.
        _part(context)
    request = replace(data_of(config).own, sites=(site or client,), of_node=True)
    info = own_info(request)
    shape, num_outputs = data_of(config).shape, data_of(config).num_outputs
    fits = (info.input_shape, info.num_classes) == (shape, num_outputs)
    if not fits and not isinstance(info.task, OwnTask):
        raise DataError(
            f"dataset={config.dataset!r} has inputs {info.input_shape} and"
            f" {info.num_classes} classes or target columns, but the run's model takes"
            f" {shape} and has {num_outputs} outputs."
        )
    data = load_dataset(info, device=pick_device(config.device))
    return whole_data(config, data, client)


def _own_data(config: Config, context: Context) -> tuple[PartitionedData, Config]:
    """Return the node's own data, and the config with the node's own ``dataset``.

    Raises:
        DataError: the data cannot be used, or do not fit the run's model.
    """
    if data_of(config).by_function:
        return _data_of_site(config, context), config

    node = context.node_config
    path = os.path.expanduser(str(node[DATA_PATH]))
    client = partition_of(context) or 0
    if not is_own(config.dataset):
        raise DataError(
            f"the node has data of its own, but dataset={config.dataset!r} names data"
            " that all nodes have. Set dataset=folder: or module:function.",
            code=ABOUT_THE_RUN,
        )

    # The run is on own data: read data in the same format from the node's path.
    kind = config.dataset.partition(":")[0]
    here = config.model_copy(
        update={"dataset": f"{kind}:{path}", "partition": "iid", "num_clients": 1}
    )
    try:
        _check_fit(config, here)
        data = load_data(here, data_of(config).shape)
        return whole_data(here, data, client), here
    except (ConfigError, DataError) as error:
        # Report any error as a fault of the node's data, because only the path differs
        # from the run's valid config.
        raise DataError(f"data-path={path!r}: {error}") from error


def _check_fit(config: Config, here: Config) -> None:
    """Raise DataError if a node's own data do not fit the run's model.

    Args:
        config: the settings of the run.
        here: the settings with the node's data.
    """
    info, wanted = data_of(here).info, data_of(config).info
    if info.input_shape != wanted.input_shape:
        raise DataError(
            f"it has inputs {data_of(here).shape}, but the run's model takes"
            f" {data_of(config).shape}."
        )
    needed, given = data_of(here).num_outputs, data_of(config).num_outputs
    if needed != given:
        raise DataError(
            f"it needs a model with {needed} outputs, but the run's model has {given}."
            " Give all sites the same classes or targets. If a site lacks a class, set"
            " num-classes."
        )
    if wanted.class_names and info.class_names != wanted.class_names:
        raise DataError(
            f"its classes are {', '.join(info.class_names[:20])}, but the run's classes"
            f" are {', '.join(wanted.class_names[:20])}. Give each class a folder of"
            " the same name; it may be empty."
        )

"""The client of a node, made from its Flower context."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context

from fedbn_flwr.client.lent_models import BuildModel
from fedbn_flwr.client.state_folder import state_dir
from fedbn_flwr.client.torch_client import TorchClient
from fedbn_flwr.data import Augment, Subset, is_own, load_local_dataset
from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.experiment.config import STATE_IN_OUT, Config, state_in_out
from fedbn_flwr.experiment.partitioned_data import PartitionedData, partitioned_data, put_aside, whole_data
from fedbn_flwr.experiment.setup import local_training, pick_device, training_model
from fedbn_flwr.messages.protocol import DATA_CLASSES, DATA_PATH, NUM_PARTITIONS, PARTITION_ID, STATE_DIR, comma_list
from fedbn_flwr.seeds import derive_seed

__all__ = ["client_fn", "num_examples"]


def client_fn(context: Context) -> TorchClient:
    """Return a node's client, made from the run config and the node config in its Flower context.

    A node with a ``data-path`` in its config trains and tests on the data there, not on a partition.

    Raises:
        ConfigError: the node config has neither ``partition-id`` and ``num-partitions`` nor ``data-path``.
        DataError: the node's own data cannot be used.
    """
    config, build = _config(tuple(context.run_config.items()))
    torch.set_num_threads(config.torch_threads)
    train, tests, validation = _node_data(config, context)
    return TorchClient(
        build,
        train,
        tests,
        local_training(config),
        context=context,
        seed=config.seed,
        task=config.learning_task(),
        state_dir=_state_dir(config, context),
        validation_data=validation,
    )


def num_examples(context: Context) -> int:
    """Return the number of a node's training examples; the node has a partition of the run's data."""
    node = context.node_config
    if DATA_PATH in node:
        raise ConfigError("only the node itself can count its own data")
    split = _split(tuple(context.run_config.items()), int(node[NUM_PARTITIONS]))
    return len(split.train[int(node[PARTITION_ID])])


@functools.lru_cache(maxsize=4)  # called for every node
def _split(items: tuple[tuple[str, Any], ...], num_clients: int) -> PartitionedData:
    return partitioned_data(_config(items)[0], num_clients)


def _state_dir(config: Config, context: Context) -> Path | None:
    """Return a node's state folder; for ``state-dir=out`` it is in the run's output folder."""
    if (str(context.node_config.get(STATE_DIR, "")) or config.state_dir) == STATE_IN_OUT:
        return state_in_out(config)
    return state_dir(context, config.state_dir)


def _node_data(config: Config, context: Context) -> tuple[Subset, dict[str, Subset], Subset | None]:
    """Return a node's training data, its test sets, and its validation data if the run has some."""
    node = context.node_config
    if DATA_PATH in node and is_own(config.dataset):
        split = _own_data(config, str(node[DATA_PATH]), int(node.get(PARTITION_ID, 0)))
        own_tests = {"own": split.test_view()}
        return split.train_view(0), own_tests, split.validation_view(0) if config.validation_share else None
    if DATA_PATH in node:
        data = load_local_dataset(
            str(node[DATA_PATH]),
            config.dataset,
            *config.example_shape()[:2],
            classes=comma_list(node, DATA_CLASSES),
            device=str(pick_device(config.device)),
            num_classes=config.num_classes,
        )
        augment, mean, std = Augment.parse(config.augment), data.mean, data.std
        own, rest, validation = Subset(data.test, None, mean=mean, std=std), None, None
        if config.validation_share:
            seed = derive_seed(config.seed, "validation", int(node.get(PARTITION_ID, 0)))
            rest, aside = put_aside(data.train, np.arange(len(data.train)), config.validation_share, seed)
            validation = Subset(data.train, aside, mean=mean, std=std)
        return Subset(data.train, rest, mean=mean, std=std, augment=augment), {"own": own}, validation
    try:
        partition_id, num_clients = (int(node[key]) for key in (PARTITION_ID, NUM_PARTITIONS))
    except KeyError as error:
        raise ConfigError(
            f"node {context.node_id}: {error} is missing from its node config. Start the SuperNode with "
            "--node-config 'partition-id=0 num-partitions=3' (its own number and the number of nodes), or with "
            "--node-config 'partition-id=0 data-path=\"/its/own/data\"'."
        ) from error
    split = partitioned_data(config, num_clients)
    tests = {"own": split.test_view(partition_id), "global": split.test_view()}
    validation = split.validation_view(partition_id) if config.validation_share else None
    return split.train_view(partition_id), tests, validation


def _own_data(config: Config, path: str, client: int) -> PartitionedData:
    """Return a node's own data of the run's kind, all for one client.

    Raises:
        DataError: they cannot be used, or do not fit the run's model.
    """
    kind = config.dataset.partition(":")[0]
    here = config.model_copy(update={"dataset": f"{kind}:{path}", "partition": "iid", "num_clients": 1})
    try:
        _check_fit(config, here)
        return whole_data(here, config.example_shape(), client, config.standardise == "local")
    except (ConfigError, DataError) as error:  # of this node's data, not of the run
        raise DataError(f"data-path={path!r}: {error}") from error


def _check_fit(config: Config, here: Config) -> None:
    """Raise DataError unless the data of the config ``here``, a node's, fit the run's config."""
    if config.standardise_as() == "federated" and not config.data_on_nodes():
        raise DataError(
            f"dataset={config.dataset!r} names data of the server, whose mean and std are not those of the nodes. "
            f"Start the run with dataset='{config.dataset.partition(':')[0]}:', or with standardise=local or none."
        )
    found, wanted = here.data_info(), config.data_info()
    if found.input_shape != wanted.input_shape:
        names, shape = found.feature_names, config.example_shape()
        has = f"{len(names)} features ({', '.join(names[:20])})" if names else f"inputs {here.example_shape()}"
        raise DataError(
            f"it has {has}; the run's model takes {shape[0] if len(shape) == 1 else shape}. Set feature-columns, with "
            "the categories of text (sex:F|M), so that all nodes have the same."
        )
    if here.num_outputs() != config.num_outputs():
        raise DataError(
            f"it needs a model with {here.num_outputs()} outputs; the run's has {config.num_outputs()}. Set "
            "num-classes."
        )
    if found.class_names != wanted.class_names and found.task.name in ("classification", "binary"):
        raise DataError(
            f"its classes have names ({', '.join(found.class_names[:20])}), whose numbers must be those of all nodes. "
            "State them in the run's config: class-names."
        )


@functools.lru_cache(maxsize=4)  # called for every message
def _config(items: tuple[tuple[str, Any], ...]) -> tuple[Config, BuildModel]:
    """Return the config, and the function that builds its model: a process builds one with the same function."""
    config = Config.make(dict(items), complete=True)
    return config, functools.partial(training_model, config)

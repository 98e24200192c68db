"""From a config to the parts of a run: data, split, model, local training, strategy. The same on every node."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.client import TorchClient
from fedbn_flwr.data import DATASETS, PARTITIONS, Augment, Dataset, View, load_dataset, load_own, split_dataset
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.experiment.config import HERE, Config
from fedbn_flwr.models import build_model, input_shape
from fedbn_flwr.records import listed
from fedbn_flwr.state import split_state
from fedbn_flwr.strategies import STRATEGIES, FedAvg
from fedbn_flwr.training import LearningRate, LocalTraining

__all__ = [
    "Federation",
    "check",
    "client_fn",
    "count_clients",
    "federation",
    "image_shape",
    "local_training",
    "make_model",
    "make_strategy",
    "pick_device",
]

DEFAULT_CLIENTS = 5  # in process, where num-clients=0 finds no federation to count


def pick_device(name: str) -> torch.device:
    """Return the torch device of a config's ``device``.

    Raises:
        ConfigError: CUDA is asked for and not there, or the name is unknown.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f"device={name!r} must be auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise ConfigError(f"device={name}: {count} CUDA device(s) found here. Use device=cpu, or device=auto.")
    return torch.device(name)


def image_shape(config: Config) -> tuple[int, int, int]:
    """Return (channels, height, width) of the images the model of a config takes."""
    info = DATASETS[config.dataset]
    channels, height = input_shape(config.model, info.channels, config.image_size or info.size)
    return channels, height, info.aspect * height


def make_model(config: Config) -> nn.Module:
    """Return the model of a config, seeded, on the CPU."""
    info = DATASETS[config.dataset]
    channels, size, _ = image_shape(config)
    model = build_model(
        config.model,
        num_classes=config.num_classes or info.num_classes,
        channels=channels,
        size=size,
        norm=config.norm,
        norm_groups=config.norm_groups,
        norm_options={
            "rmax": config.renorm_rmax,
            "dmax": config.renorm_dmax,
            "activation": config.activation,
            "gain": config.wsconv_gain,
        },
        seed=config.seed,
    )
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = config.bn_momentum
    return model


def local_training(config: Config) -> LocalTraining:
    """Return the settings of local training."""
    after, factors = config.decays()
    return LocalTraining(
        learning_rate=LearningRate(config.learning_rate, after, factors),
        local_steps=config.local_steps,
        local_epochs=config.local_epochs,
        batch_size=config.batch_size,
        sgd_momentum=config.sgd_momentum,
        weight_decay=config.weight_decay,
        amp=config.amp,
    )


def make_strategy(config: Config, model: nn.Module, num_nodes: int) -> FedAvg:
    """Return the strategy of a config for a federation of ``num_nodes``, its parts split by the model's layer types."""
    strategy = STRATEGIES[config.strategy]
    fields = {name for name in strategy.Params.__dataclass_fields__ if name in Config.model_fields}
    settings: dict[str, Any] = {name: getattr(config, name) for name in fields}
    return strategy(
        fraction_train=config.fraction_train,
        fraction_evaluate=config.fraction_evaluate,
        min_train_nodes=1,
        min_evaluate_nodes=1,
        # They were all there at the start (``run.serve`` counts them); a round goes on without those lost since.
        min_available_nodes=min(num_nodes, config.min_replies),
        parts=split_state(model),
        **settings,
    )


@dataclass(frozen=True)
class Federation:
    """The data of a run and its split: training and test examples of each client by index."""

    dataset: Dataset
    train: tuple[np.ndarray[Any, np.dtype[np.int64]], ...]
    test: tuple[np.ndarray[Any, np.dtype[np.int64]], ...]
    augment: Augment | None

    def train_view(self, partition_id: int | None = None) -> View:
        """Return a client's training data; of all clients together without a partition id."""
        own = np.concatenate(self.train) if partition_id is None else self.train[partition_id]
        return View(self.dataset.train, own, mean=self.dataset.mean, std=self.dataset.std, augment=self.augment)

    def test_view(self, partition_id: int | None = None) -> View:
        """Return a client's own test data, or the whole test set."""
        own = None if partition_id is None else self.test[partition_id]
        return View(self.dataset.test, own, mean=self.dataset.mean, std=self.dataset.std)

    def domain_views(self) -> dict[str, View]:
        """Return the test set of each domain (group) that has one, by name; empty where the data have no groups."""
        data, groups = self.dataset, self.dataset.test.groups
        if groups is None:
            return {}
        found = {name: torch.nonzero(groups == index).flatten() for index, name in enumerate(data.group_names)}
        return {name: View(data.test, own, mean=data.mean, std=data.std) for name, own in found.items() if len(own)}

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
    return (
        DEFAULT_CLIENTS if groups is None else len(torch.unique(groups))
    )  # without groups the split says what is wrong


def federation(config: Config, num_clients: int) -> Federation:
    """Load the data and split it over ``num_clients``.

    Raises:
        DataError: the data is not there, or cannot be split as asked.
    """
    # Only what the data and their split depend on: runs that differ in anything else share them.
    return _federation(num_clients, _dataset(config), *(getattr(config, key) for key in _SPLIT_KEYS))


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
def _federation(num_clients: int, data: Dataset, *values: Any) -> Federation:
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
    return Federation(data, tuple(train), tuple(test), Augment.parse(of["augment"]))


def client_fn(context: Context) -> TorchClient:
    """Make a node's client from its Flower context: run config and partition id in, everything else follows.

    A node whose config has a ``data-path`` trains and tests on the data there, in place of a partition.

    Raises:
        ConfigError: the node was told neither (``partition-id`` and ``num-partitions``, or ``data-path``).
        DataError: its own data cannot be used.
    """
    config = _config(tuple(context.run_config.items()))
    torch.set_num_threads(config.torch_threads)
    train, tests = _node_data(config, context)
    model = make_model(config).to(pick_device(config.device))
    if next(model.parameters()).is_cuda:
        model = model.to(memory_format=torch.channels_last)
    return TorchClient(
        model,
        train,
        tests,
        local_training(config),
        context=context,
        seed=config.seed,
        task=DATASETS[config.dataset].task,
        state_dir=_state_dir(config, context),
    )


def _state_dir(config: Config, context: Context) -> Path | None:
    """Return the folder in which a node keeps its part: its own, or the one the run names."""
    named = str(context.node_config.get("state-dir", "")) or config.state_dir
    if named == HERE:
        return Path(config.out) / "checkpoint" / "clients"
    if named and not Path(named).is_absolute():
        raise ConfigError(f"state-dir={named!r} of node {context.node_id} is relative; write an absolute path")
    return Path(named) if named else None


def _node_data(config: Config, context: Context) -> tuple[View, dict[str, View]]:
    """Return a node's training data and its test sets."""
    node = context.node_config
    if "data-path" in node:
        data = load_own(
            str(node["data-path"]),
            config.dataset,
            *image_shape(config)[:2],
            classes=tuple(listed(node, "data-classes")),
            device=str(pick_device(config.device)),
            num_classes=config.num_classes,
        )
        augment = Augment.parse(config.augment)
        own = View(data.test, None, mean=data.mean, std=data.std)
        return View(data.train, None, mean=data.mean, std=data.std, augment=augment), {"own": own}
    try:
        partition_id, num_clients = (int(node[key]) for key in ("partition-id", "num-partitions"))
    except KeyError as error:
        raise ConfigError(
            f"node {context.node_id}: {error} is missing from its node config. Start the SuperNode with "
            "--node-config 'partition-id=0 num-partitions=3' (its own number and the number of nodes), or with "
            "--node-config 'partition-id=0 data-path=\"/its/own/data\"'."
        ) from error
    split = federation(config, num_clients)
    return split.train_view(partition_id), {"own": split.test_view(partition_id), "global": split.test_view()}


@functools.lru_cache(maxsize=4)  # a pure function, called for every message
def _config(items: tuple[tuple[str, Any], ...]) -> Config:
    return Config.make(dict(items), complete=True)


def check(config: Config) -> None:
    """Refuse before any work what cannot run here: no such device, no such folder, a method without its layers.

    The model is built and tried on two black images: what raises there would raise in every client.

    Raises:
        ConfigError: every such problem, one a line; an augmentation that does not fit the images.
        NormLayerError: the strategy needs BatchNorm and the model has none; a norm that does not fit the layers.
    """
    problems = []
    try:
        pick_device(config.device)
    except ConfigError as error:
        problems.append(str(error))
    if config.data_dir and not Path(config.data_dir).is_absolute():
        problems.append(
            f"data-dir={config.data_dir!r} is relative, and nodes run in other folders. Write the absolute path "
            f"(seen from the folder of this process: {str(Path(config.data_dir).absolute())!r})."
        )
    elif config.data_dir and not Path(config.data_dir).is_dir():
        problems.append(f"data-dir={config.data_dir!r} is not a folder. Create it, or name the one with the data.")
    if config.state_dir == HERE and not config.out:
        problems.append(f"state-dir={HERE} is a folder in `out`, which is not set: set it to an absolute path")
    elif config.state_dir not in ("", HERE) and not Path(config.state_dir).is_absolute():
        problems.append(
            f"state-dir={config.state_dir!r} is relative, and nodes run in other folders. Write it in full."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    model = make_model(config)
    strategy = STRATEGIES.get(config.strategy)
    if strategy is not None and strategy.needs_batchnorm and not split_state(model).layers:
        norms = [(path, kind) for path, module in model.named_modules() if (kind := _norm_kind(module))]
        kinds = " and ".join(sorted({kind for _, kind in norms}))
        has = f"only {kinds} ({', '.join(path for path, _ in norms[:2])}, ...)" if norms else "no normalisation"
        raise NormLayerError(
            f"strategy {config.strategy!r} needs BatchNorm; model {config.model!r} has {has}. Use "
            "strategy='fedavg' or norm='batch'."
        )
    if config.gathers() and not list(split_state(model).moments()):
        raise NormLayerError(
            f"recalibrate and eval-on=recalibrated gather BatchNorm's running statistics; model {config.model!r} with "
            f"norm={config.norm!r} has none. Use norm='batch', or leave both out."
        )
    _try_model(config, model)


def _try_model(config: Config, model: nn.Module) -> None:
    images = torch.zeros(2, *image_shape(config), dtype=torch.uint8)
    if augment := Augment.parse(config.augment):
        images = augment(images, torch.Generator())
    with torch.no_grad():
        model.eval()(images.float())


def _norm_kind(module: nn.Module) -> str:
    """Return the name of torch's normalisation class the module is, "" for other layers."""
    names = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn")]
    return names[0] if names and "Norm" in names[0] else ""

"""Make the device, model, local training and strategy of a config, for all nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.batchnorm.train_only import train_only
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import (
    Config,
    data_of,
    learning_rate_of,
    method_of,
)
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.lab.models.own import is_own
from fedbn_flwr.lab.own_code import own_function
from fedbn_flwr.messages.protocol import VALIDATION_LOSS
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.strategies import FedBS, Strategy
from fedbn_flwr.training.batches import set_memory_format
from fedbn_flwr.training.freezing import (
    force_eval_as_built,
    layers_of,
    unlike_in_tests,
)
from fedbn_flwr.training.model_state import no_tensors
from fedbn_flwr.training.settings import LocalTraining

if TYPE_CHECKING:
    from fedbn_flwr.lab.models import InitReport

__all__ = [
    "build_options",
    "client_tests",
    "in_memory_format",
    "initialise",
    "local_training",
    "make_model",
    "make_strategy",
    "model_and_warnings",
    "on_device",
    "pick_device",
    "reuses_models",
    "training_model",
]


def pick_device(name: str) -> torch.device:
    """Return the torch device of a config's ``device``.

    Raises:
        ConfigError: the name is unknown, or there is no such CUDA device.
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
        raise ConfigError(
            f"device={name}: {count} CUDA device(s) found here. Use device=cpu, or"
            " device=auto."
        )
    return torch.device(name)


def on_device(model: nn.Module, config: Config) -> nn.Module:
    """Return the model on the device of a config, in the model's best memory format."""
    return in_memory_format(model.to(pick_device(config.device)), config)


def in_memory_format(model: nn.Module, config: Config) -> nn.Module:
    """Return the model in the memory format that suits it best.

    A user's loop gets the model in the format in which it was built.
    """
    if config.loop:
        return model
    return set_memory_format(model, lambda: torch.zeros(2, *data_of(config).shape))


def training_model(config: Config) -> nn.Module:
    """Return the model of a config, ready to train."""
    return on_device(make_model(config), config)


def reuses_models(config: Config) -> bool:
    """Return whether a message changes nothing in a model but its state dict.

    A user's model, task or loop may change more.
    """
    return not (is_own(config.model) or ":" in config.task or config.loop)


def build_options(config: Config) -> dict[str, Any]:
    """Return the arguments with which a config calls ``build_model``, as JSON values."""
    options: dict[str, Any] = {
        "name": config.model,
        "num_classes": data_of(config).num_outputs,
        "input_shape": list(data_of(config).shape),
        "norm": config.norm,
        "norm_groups": config.norm_groups,
        "seed": config.seed,
    }
    if config.feature_norm:
        options["feature_norm"] = config.feature_norm
    return options


def make_model(config: Config) -> nn.Module:
    """Return the model of a config on the CPU, with seeded weights."""
    return model_and_warnings(config)[0]


def model_and_warnings(config: Config) -> tuple[nn.Module, list[str]]:
    """Return the model as ``make_model``, and warnings about its BN."""
    model = build_model(**build_options(config))
    why = no_tensors(model)
    if why:
        raise ConfigError(f"model {config.model!r}: {why}")
    warnings: list[str] = []

    # Every BN layer gets bn-momentum. Warn if a layer had another momentum, unless it
    # was torch's default 0.1.
    replaced = []
    for path, layer in layers_of(model).items():
        if layer.momentum not in (0.1, config.bn_momentum):
            replaced.append(f"'{path}': {layer.momentum}")
        layer.momentum = config.bn_momentum
    if replaced:
        warnings.append(
            f"bn-momentum={config.bn_momentum:g} replaces the momentum of"
            f" {len(replaced)} BatchNorm layers of model {config.model!r} (of"
            f" {replaced[0]}). Set bn-momentum to the value that the model should have."
        )

    # Keep the layers in eval mode that the model's builder has put into eval mode. Then
    # freeze the layers outside train-only.
    kept = force_eval_as_built(model)
    if kept:
        warnings.append(f"model {config.model!r}: {kept}")
    train_only(model, config.train_only)
    unlike = unlike_in_tests(model)
    if unlike:
        warnings.append(f"model {config.model!r}: {unlike}")
    return model, warnings


def initialise(model: nn.Module, config: Config) -> InitReport | None:
    """Load the initial weights of a config into the model, in place.

    Only the server loads the weights, and then sends them. The nodes need no file of
    weights, and a resumed run has its checkpoint.

    Returns:
        The report; None without ``init``.

    Raises:
        ConfigError: the weights cannot be read, or none fits.
    """
    if not config.init:
        return None
    # Import here, because load_initial imports readers of weight files that most runs
    # do not need.
    from fedbn_flwr.lab.models import load_initial

    return load_initial(model, config.init)


def local_training(config: Config) -> LocalTraining:
    """Return the settings of local training."""
    return LocalTraining(
        learning_rate=learning_rate_of(config),
        local_steps=config.local_steps,
        local_epochs=config.local_epochs,
        batch_size=config.batch_size,
        optimizer=config.optimizer,
        sgd_momentum=config.sgd_momentum,
        weight_decay=config.weight_decay,
        amp=config.amp,
        loop=own_function("loop", config.loop) if config.loop else None,
    )


def make_strategy(config: Config, model: nn.Module, num_nodes: int) -> Strategy:
    """Return the strategy of a config for ``num_nodes`` nodes.

    The state is split by the model's layer types.
    """
    method = method_of(config)
    changed: dict[str, str] = {}
    kept = method.methods.local & {Part.AFFINE, Part.STATISTICS, Part.PERSONAL}
    if config.held_out_clients and kept and not method.shares_nothing:
        # Held-out clients have no local entries, so they are tested with the average of
        # the clients' entries.
        changed["eval_on"] = ",".join(dict.fromkeys((*method.tests, SHARED_BN)))
    if config.validation_share and config.strategy == FedBS.name:
        changed["loss_key"] = VALIDATION_LOSS
    methods = method.methods
    if changed:
        params = method.params.model_copy(update=changed)
        methods = Methods(method.strategy.combination.kinds, params)
    strategy = method.strategy(
        fraction_train=config.fraction_train,
        min_train_nodes=1,
        min_evaluate_nodes=1,
        # ``serve`` waits for all nodes at the start. A later round does not wait for
        # nodes that were lost since then.
        min_available_nodes=1,
        parts=method.parts(model),
        # Require the same number of partitions on all nodes. A node with another number
        # would train on the examples of held-out clients.
        num_partitions=num_nodes if config.held_out_clients else 0,
        # The strategy does not add averaged BN to its tests, because the result writer
        # does so.
        completes_tests=False,
        methods=methods,
    )
    if not client_tests(config):
        # Set this after the construction, because Flower warns if the argument is 0.
        strategy.fraction_evaluate = 0.0
    return strategy


def client_tests(config: Config) -> list[str]:
    """Return the tests of ``eval-on`` that clients do, without the prefix "personal-"."""
    prefix = "personal-"
    names = method_of(config).tests
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

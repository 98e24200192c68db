"""The models by name, seeded. A new model is one file and one line of ``MODELS``."""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import nn

from fedbn_flwr.errors import ConfigError, unknown_name
from fedbn_flwr.models.info import ModelInfo
from fedbn_flwr.models.lenet import lenet, lenet_shape
from fedbn_flwr.models.mlp import mlp, mlp_shape
from fedbn_flwr.models.resnet import resnet_shape, small_resnet
from fedbn_flwr.models.zoo import PREFIX, zoo_info, zoo_names
from fedbn_flwr.norms import NORMS, replace_norm
from fedbn_flwr.seeds import derive_seed

__all__ = ["MODELS", "build_model", "input_shape", "model_info"]

MODELS: dict[str, ModelInfo] = {
    "mlp": ModelInfo("784-30-classes, one BN layer, for MNIST", "FedTAN, arXiv:2301.02982, 6.1", mlp, mlp_shape),
    "lenet": ModelInfo("LeNet-like CNN, two BN layers", "FixBN, arXiv:2303.06530, 4", lenet, lenet_shape),
    "resnet20": ModelInfo(
        "ResNet-20 for small images, option A shortcuts, 19 BN layers",
        "He et al. 2016, arXiv:1512.03385, 4.2",
        partial(small_resnet, depth=20),
        resnet_shape,
    ),
    f"{PREFIX}<name>": zoo_info("<name>"),
}

# Layers draw their initial weights from torch's one default generator: two builds at a time would mix their draws.
_BUILDING = threading.Lock()


def model_info(name: str) -> ModelInfo:
    """Return the entry of a model name: a key of ``MODELS``, or ``torchvision:`` and the name of a classifier.

    Raises:
        ConfigError: an unknown name, with the nearest one.
    """
    if name.startswith(PREFIX):
        return zoo_info(name.removeprefix(PREFIX))
    if name in MODELS:
        return MODELS[name]
    if name in zoo_names():
        raise ConfigError(
            f"unknown model {name!r}. Did you mean {PREFIX + name!r}? Allowed: {', '.join(sorted(MODELS))}."
        )
    raise unknown_name("model", name, MODELS)


def input_shape(name: str, channels: int, size: int) -> tuple[int, int]:
    """Return the (channels, size) of the square images the model takes, for a data set whose own images have these.

    Raises:
        ConfigError: an unknown model, or channels or size below 1.
    """
    _at_least_one(channels=channels, size=size)
    return model_info(name).shape(channels, size)


def build_model(
    name: str, *, num_classes: int, channels: int, size: int, norm: str = "batch", norm_groups: int = 2, seed: int = 0
) -> nn.Module:
    """Return a model on the CPU in training mode that maps images to logits (N, num_classes).

    The model is built with BatchNorm for ``input_shape(name, channels, size)``, then ``replace_norm`` is applied: all
    kinds of norm share their other initial weights. Equal arguments give equal weights; the global random state is left
    as it was (a thread that draws from it during the call would change the result).

    Args:
        name: a model name, see ``model_info``.
        num_classes: number of logits.
        channels: channels of the data set's images.
        size: side of the data set's images in pixels.
        norm: a key of ``NORMS``.
        norm_groups: number of groups of the kinds that take it.
        seed: seed of the run.

    Raises:
        ConfigError: an unknown name, or a number below 1.
        NormLayerError: the norm does not fit the model's layers.
    """
    _at_least_one(num_classes=num_classes)
    if norm not in NORMS:
        raise unknown_name("norm", norm, NORMS)
    shape = input_shape(name, channels, size)
    with _BUILDING, torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed the generators of all accelerators, which are not forked here.
        torch.default_generator.manual_seed(derive_seed(seed, "model"))
        model = model_info(name).build(num_classes, *shape)
    options = {"groups": norm_groups} if "groups" in NORMS[norm].options else {}
    return replace_norm(model, norm, **options)[0]


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1.")

"""The registry of models and the seeded build.

To add a model, write a file and add a line to ``MODELS``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from fedbn_flwr.errors import ConfigError, unknown_name
from fedbn_flwr.lab.models import lenet, mlp, resnet
from fedbn_flwr.lab.models.info import ModelInfo, always, at_least
from fedbn_flwr.lab.models.own import OWN, is_own, own_info
from fedbn_flwr.lab.models.resnet import SmallResNet
from fedbn_flwr.lab.models.zoo import PREFIX, zoo_info, zoo_names
from fedbn_flwr.norms import NORMS, FeatureScale, replace_norm, use_feature_norm
from fedbn_flwr.training.randomness import derive_seed, seeded

__all__ = ["MODELS", "build_model", "input_shape", "model_info"]


def _small_resnet(depth: int) -> ModelInfo:
    return ModelInfo(
        f"ResNet-{depth} for small images, option A shortcuts, {depth - 1} BN layers",
        "He et al. 2016, arXiv:1512.03385, 4.2",
        lambda classes, channels, size: SmallResNet(depth, classes, channels),
        at_least(resnet.SMALLEST),
    )


MODELS: dict[str, ModelInfo] = {
    "mlp": ModelInfo(
        "784-30-classes, one BN layer, for MNIST; also for rows of numbers (tables)",
        "FedTAN, arXiv:2301.02982, 6.1",
        lambda classes, channels, size: mlp.MLP(classes),
        always(1, mlp.SIDE),
        rows=mlp.MLP,
    ),
    "lenet": ModelInfo(
        "LeNet-like CNN, two BN layers",
        "FixBN, arXiv:2303.06530, 4",
        lenet.LeNet,
        at_least(lenet.SMALLEST),
    ),
    **{f"resnet{depth}": _small_resnet(depth) for depth in (20, 32, 44, 56)},
    f"{PREFIX}<name>": zoo_info("<name>"),
    OWN: own_info("<module>:<function>"),
}

# Layers draw their initial weights from torch's default generators. This lock prevents
# two builds from mixing their draws.
_BUILDING = threading.Lock()


def model_info(name: str) -> ModelInfo:
    """Return the entry of a model name.

    A name is a key of ``MODELS``, ``torchvision:`` and the name of a classifier, or a
    user's ``module:function``.

    Raises:
        ConfigError: the name is unknown; the message suggests the nearest one.
    """
    if name.startswith(PREFIX):
        return zoo_info(name.removeprefix(PREFIX))
    if name in MODELS:
        return MODELS[name]
    if is_own(name):
        return own_info(name)
    # Suggest the prefix, because users often forget it before a name of torchvision.
    if name in zoo_names():
        raise ConfigError(
            f"unknown model {name!r}. Did you mean {PREFIX + name!r}? Allowed:"
            f" {', '.join(sorted(MODELS))}."
        )
    raise unknown_name("model", name, MODELS)


def input_shape(
    name: str, channels: int, size: int, *, asked: bool = False
) -> tuple[int, int]:
    """Return the (channels, size) of the square images that the model takes.

    Args:
        name: a model name, see ``model_info``.
        channels: channels of the data set's images.
        size: height of the data set's images.
        asked: whether the config sets this size (``image-size``); it may be below the
            size that the model takes by default.

    Raises:
        ConfigError: the model is unknown, or channels or size are below 1.
    """
    if channels < 1 or size < 1:
        raise ConfigError(
            f"images of {channels} channels and {size} pixels: use at least 1 of each."
        )
    info = model_info(name)
    channels_taken, size_taken = info.shape(channels, size)
    if asked and info.smallest:
        size_taken = max(size, info.smallest)
    return channels_taken, size_taken


# the field of ``ModelInfo`` that builds a model, by the number of dimensions of an
# example
_KINDS = {1: "rows", 2: "signals", 3: "build", 4: "volumes"}
# a second name, because ``build_model`` has an argument called ``input_shape``
_image_input = input_shape


def build_model(
    name: str,
    *,
    num_classes: int,
    channels: int = 0,
    size: int = 0,
    input_shape: Sequence[int] = (),
    norm: str = "batch",
    norm_groups: int = 2,
    feature_norm: FeatureScale | None = None,
    seed: int = 0,
) -> nn.Module:
    """Return a model on the CPU in training mode, from inputs to logits.

    Logits are (N, num_classes, ...). The model is built with BatchNorm for rows, for
    signals, or for images of ``input_shape(name, channels, size)``. Then
    ``replace_norm`` is applied, so all other initial weights are equal for every norm
    (``fixup`` changes some of them). Equal arguments give equal weights. The global
    random state does not change (a thread that draws from it during the call changes
    the result).

    Args:
        name: a model name, see ``model_info``.
        num_classes: number of logits.
        channels: channels of the data set's images.
        size: height of the data set's images in pixels.
        input_shape: shape of an example, instead of ``channels`` and ``size``:
            (features,) for rows of numbers, (channels, length) for signals, (channels, height,
            width) for images, or (channels, depth, height, width) for volumes.
        norm: a key of ``NORMS``.
        norm_groups: number of groups, for the norms that have groups.
        feature_norm: the scale of the normalised features before the classifier; None
            for unchanged features.
        seed: seed of the run.

    Raises:
        ConfigError: a name is unknown, a number is below 1, or the model does not take
            such inputs.
        NormLayerError: the norm does not fit the model's layers, or the model has no
            linear classifier to normalise.
    """
    if norm not in NORMS:
        raise unknown_name("norm", norm, NORMS)
    build = _builder(name, num_classes, tuple(input_shape) or (channels, size, size))
    with _BUILDING, seeded(derive_seed(seed, "model"), cpu_only=True):
        model = build()
    options = {"groups": norm_groups} if "groups" in NORMS[norm].options else {}
    # Replace the norm layers after the build, so that the initial weights of the other
    # layers are equal for every norm.
    model, _ = replace_norm(model, norm, in_place=True, **options)
    if feature_norm:
        use_feature_norm(model, feature_norm, num_classes)
    return model


def _builder(
    name: str, num_classes: int, shape: tuple[int, ...]
) -> Callable[[], nn.Module]:
    """Return the function that builds the model for inputs of this shape."""
    kind = _KINDS.get(len(shape), "")
    build: Callable[..., nn.Module] | None = getattr(model_info(name), kind or "build")
    if not kind or build is None or min(num_classes, *shape) < 1:
        # Name the models that accept such examples. Also name the user's own model,
        # because it may accept them.
        fitting = [
            key
            for key, other in MODELS.items()
            if getattr(other, kind or "build") and key != OWN
        ]
        raise ConfigError(
            f"model {name!r} does not take examples of shape {shape} in {num_classes}"
            " classes. Rows are (features,), signals (channels, length), images"
            " (channels, height, width), volumes (channels, depth, height, width). Use"
            f" {', '.join([*fitting, 'your own model (module:function)'])}."
        )
    # Only images are scaled to the size that the model needs.
    if kind == "build":
        shape = _image_input(name, *shape[:2])
    return partial(build, num_classes, *shape)

"""Networks of optional packages, ``timm:NAME`` and ``smp:ARCHITECTURE/ENCODER``.

These networks have no pretrained weights. timm's classifiers take any number of
channels. A classifier that works for only one size of images (position tables, windows)
takes images of this size.

smp's networks (segmentation-models-pytorch) return logits (N, classes, H, W). Among
them are FixBN's DeepLabv3+ with MobileNetV2 (``smp:DeepLabV3Plus/mobilenet_v2``) and
with ResNet-50. Most of smp's networks need heights and widths that are multiples of 32,
so images are scaled to the next multiple.

The functions import the packages, so the packages may be absent.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError, install_extra
from fedbn_flwr.lab.models.info import ModelInfo

TIMM_PREFIX, SMP_PREFIX = "timm:", "smp:"
# Heights of images in pixels. Smaller images are enlarged to SMALLEST. If a config sets
# the height by ``image-size``, the smallest height is SMALLEST_ASKED.
SMALLEST, SMALLEST_ASKED = 64, 32
MULTIPLE = 32


def timm_info(name: str) -> ModelInfo:
    """Return the entry of timm's classifier ``name``."""
    # For an unknown name, ``build`` and ``shape`` raise an error when they are called.
    return ModelInfo(
        "a timm classifier, e.g. timm:resnet18; any channels, 64 pixels or more (32 by"
        " image-size); extra `timm`",
        "Wightman 2019, timm",
        partial(_build_timm, name),
        partial(_timm_shape, name),
        smallest=SMALLEST_ASKED,
    )


def smp_info(name: str) -> ModelInfo:
    """Return the entry of an smp network ``ARCHITECTURE/ENCODER``."""
    # For an unknown name, ``build`` raises an error when it is called.
    return ModelInfo(
        "a segmenter, e.g. smp:DeepLabV3Plus/mobilenet_v2; logits per pixel, multiples"
        " of 32 pixels; extra `smp`",
        "Iakubovskii 2019, segmentation-models-pytorch",
        partial(_build_smp, name),
        partial(_smp_shape, name),
        per_pixel=True,
    )


def published_timm(name: str, channels: int) -> dict[str, Tensor]:
    """Download the published weights of timm's network, adapted to the channels."""
    # timm builds the network with random weights first. Restore the random state
    # afterwards.
    with torch.random.fork_rng(devices=[]):
        model = _imported("timm", "timm").create_model(
            name, pretrained=True, in_chans=channels
        )
    state: dict[str, Tensor] = model.state_dict()
    return state


def published_smp(name: str, channels: int) -> dict[str, Tensor]:
    """Download an encoder's ImageNet weights. smp adapts them to the channels."""
    smp = _imported("segmentation_models_pytorch", "smp")
    with torch.random.fork_rng(devices=[]):
        model = smp.encoders.get_encoder(
            name.partition("/")[2], in_channels=channels, weights="imagenet"
        )
    return {f"encoder.{entry}": value for entry, value in model.state_dict().items()}


def _build_timm(name: str, num_classes: int, channels: int, size: int) -> nn.Module:
    create = _imported("timm", "timm").create_model
    return _built(
        f"timm:{name}",
        create,
        name,
        pretrained=False,
        num_classes=num_classes,
        in_chans=channels,
    )


def _build_smp(name: str, num_classes: int, channels: int, size: int) -> nn.Module:
    create = _imported("segmentation_models_pytorch", "smp").create_model
    options = {"encoder_weights": None, "in_channels": channels, "classes": num_classes}
    architecture, _, encoder = name.partition("/")
    return _built(f"smp:{name}", create, architecture, encoder, **options)


def _built(
    name: str, create: Callable[..., nn.Module], *names: str, **options: Any
) -> nn.Module:
    try:
        return create(*names, **options)
    # timm and smp raise several kinds of errors. Their texts name the models that the
    # packages offer.
    except Exception as error:
        raise ConfigError(f"model {name!r} cannot be built: {error}") from error


def _timm_shape(name: str, channels: int, size: int) -> tuple[int, int]:
    # The name before the dot is the network. A tag after the dot selects weights.
    published = _imported("timm", "timm").get_pretrained_cfg(name.partition(".")[0])
    if published is not None and published.fixed_input_size:
        return channels, published.input_size[1]
    return channels, max(size, SMALLEST)


def _smp_shape(name: str, channels: int, size: int) -> tuple[int, int]:
    # Round up to a multiple of MULTIPLE.
    return channels, -(-max(size, SMALLEST) // MULTIPLE) * MULTIPLE


def _imported(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # If another module is missing, the package is installed, but lacks a
        # dependency.
        if error.name != module:
            raise
        raise ConfigError(
            f"models {extra}:... need the package {module.replace('_', '-')}, but it is"
            f" not installed; {install_extra(extra)}"
        ) from error

"""torchvision's classifiers by name, without pretrained weights.

The functions import torchvision themselves, because the import takes longer than
torch's, and over a network a client starts a process for every message.

``torchvision:<name>``: inputs are (3, S, S) images with S at least 64, or at least 32 if
the config sets the size (some networks need more, see below). Differs from
torchvision's defaults: googlenet and inception_v3 have no auxiliary classifiers, so
training also returns plain logits. They use torch's default initialisation, because
their own truncated-normal initialisation is slow.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from fedbn_flwr.errors import unknown_name
from fedbn_flwr.lab.models.info import ModelInfo

PREFIX = "torchvision:"
SMALLEST = 64
# Heights that torchvision's layers require: position tables and windows have one size,
# and a stem without padding needs larger images.
FIXED_SIZE = {
    "maxvit_t": 224,
    "vit_b_16": 224,
    "vit_b_32": 224,
    "vit_h_14": 224,
    "vit_l_16": 224,
    "vit_l_32": 224,
}
LARGER = {"inception_v3": 75}
# Smallest heights if a config sets the height by ``image-size``.
SMALLEST_ASKED = 32
LARGER_ASKED = {"alexnet": 63, **LARGER}
WITH_AUXILIARY = ("googlenet", "inception_v3")


def zoo_info(name: str) -> ModelInfo:
    """Return the entry of the classifier ``name``."""
    # ``shape`` raises for an unknown name.
    return ModelInfo(
        "a torchvision classifier, e.g. torchvision:resnet18; 3 channels, 64 pixels or"
        " more (32 by image-size)",
        "torchvision.models",
        partial(_build, name),
        partial(_shape, name),
        smallest=0 if name in FIXED_SIZE else LARGER_ASKED.get(name, SMALLEST_ASKED),
    )


def zoo_names() -> list[str]:
    """Return the names of torchvision's image classifiers."""
    import torchvision.models

    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def _build(name: str, num_classes: int, channels: int, size: int) -> nn.Module:
    import torchvision.models

    extra = {}
    if name in WITH_AUXILIARY:
        extra = {"aux_logits": False, "init_weights": False}
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, num_classes=num_classes, **extra
    )
    return model


def _shape(name: str, channels: int, size: int) -> tuple[int, int]:
    if name not in zoo_names():
        raise unknown_name("torchvision classifier", name, zoo_names())
    return 3, FIXED_SIZE.get(name, max(size, LARGER.get(name, SMALLEST)))

"""``torchvision-seg:<name>``: torchvision's semantic segmentation networks, without pretrained weights.

The functions import torchvision: it takes longer to import than torch, and over a network a client starts a process for
every message.

Logits are (N, classes, H, W) for images (N, 3, H, W): the entry "out" of torchvision's dictionary. There is no
auxiliary classifier. FixBN trains DeepLabv3+; torchvision has only DeepLabv3; ``smp:`` models have it.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from fedbn_flwr.errors import unknown_name
from fedbn_flwr.lab.models.info import ModelInfo

__all__ = ["SEGMENTATION_PREFIX", "Segmenter", "segmentation_info", "segmentation_names"]

SEGMENTATION_PREFIX = "torchvision-seg:"
SMALLEST = 64


class Segmenter(nn.Module):
    """A network of torchvision that returns its logits only."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap ``model``, whose forward returns a dictionary with "out"."""
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, classes, H, W) of images (N, 3, H, W)."""
        logits: Tensor = self.model(x)["out"]
        return logits


def segmentation_info(name: str) -> ModelInfo:
    """Return the entry of the network ``name``; for an unknown name ``shape`` raises ConfigError."""
    return ModelInfo(
        "a torchvision segmenter, e.g. torchvision-seg:deeplabv3_mobilenet_v3_large; logits per pixel",
        "torchvision.models.segmentation",
        partial(_build, name),
        partial(_shape, name),
        per_pixel=True,
    )


def segmentation_names() -> list[str]:
    """Return the names of torchvision's segmentation networks."""
    import torchvision.models

    names: list[str] = torchvision.models.list_models(module=torchvision.models.segmentation)
    return names


def _build(name: str, num_classes: int, channels: int, size: int) -> nn.Module:
    import torchvision.models

    return Segmenter(torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=num_classes))


def _shape(name: str, channels: int, size: int) -> tuple[int, int]:
    if name not in segmentation_names():
        raise unknown_name("torchvision segmenter", name, segmentation_names())
    return 3, max(size, SMALLEST)

"""The shape in which a data set's images lie in memory, and bringing images into it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr.data.samples import Samples

__all__ = ["Shape", "reshaped"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a reader is asked for.

    Attributes:
        channels: 1 or 3.
        height: in pixels.
        width: in pixels.
        max_bytes: readers that decode image files refuse more bytes of images and targets than this.
    """

    channels: int
    height: int
    width: int
    max_bytes: int


def reshaped(samples: Samples, shape: Shape, chunk: int = 4096) -> Samples:
    """Return the samples with the shape's channels and pixels, computed ``chunk`` images at a time.

    Images become grey by ITU-R 601 luma or grey is repeated without a copy; they are resized bilinear with
    antialiasing, pixel targets to the nearest. The same samples where nothing is to do.
    """
    inputs, targets, size = samples.inputs, samples.targets, (shape.height, shape.width)
    if (inputs.shape[1], *inputs.shape[2:]) == (shape.channels, *size):
        return samples
    if shape.channels < inputs.shape[1]:
        inputs = torch.cat([_luma(part) for part in torch.split(inputs, chunk)])
    if inputs.shape[2:] != size:
        inputs = torch.cat([_resized(part, size) for part in torch.split(inputs, chunk)])
        if targets.ndim == 3:
            targets = F.interpolate(targets.unsqueeze(1), size, mode="nearest-exact").squeeze(1)
    return Samples(inputs.expand(-1, shape.channels, -1, -1), targets, samples.groups)


def _luma(images: Tensor) -> Tensor:
    """Return RGB bytes as grey, (299 R + 587 G + 114 B) / 1000 rounded, in integers: exact on every machine."""
    red, green, blue = torch.split(images.to(torch.int32), 1, dim=1)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).to(torch.uint8)


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return uint8 images at the new size: in float32, as torch's uint8 kernels round differently between CPUs."""
    resized = F.interpolate(images.float(), size, mode="bilinear", align_corners=False, antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)

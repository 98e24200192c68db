"""The shape of a data set's images in memory, and the conversion of images to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr.lab.data.samples import Samples

__all__ = ["Shape", "fitted", "per_channel", "reshaped"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape that a reader is asked for.

    Attributes:
        channels: 1 or 3.
        height: in pixels.
        width: in pixels.
        originals: image files stay on the disk, for augmentation of the images as
            stored.
    """

    channels: int
    height: int
    width: int
    originals: bool = False


def reshaped(samples: Samples, shape: Shape, chunk: int = 4096) -> Samples:
    """Return the samples in this shape, computed ``chunk`` images at a time; the same
    samples if they have it already.

    RGB becomes grey by ITU-R 601 luma; grey is repeated over three channels without a
    copy. Images are resized bilinear with antialiasing, pixel targets to the nearest.
    """
    size = (shape.height, shape.width)
    if not samples.in_memory:  # they have it
        return samples
    inputs, targets = samples.inputs, samples.targets
    if (inputs.shape[1], *inputs.shape[2:]) == (shape.channels, *size):
        return samples
    if shape.channels < inputs.shape[1]:
        inputs = torch.cat([_luma(part) for part in torch.split(inputs, chunk)])
    if inputs.shape[2:] != size:
        inputs = torch.cat(
            [_resized(part, size) for part in torch.split(inputs, chunk)]
        )
        if targets.ndim == 3:
            targets = F.interpolate(
                targets.unsqueeze(1), size, mode="nearest-exact"
            ).squeeze(1)
    return Samples(
        inputs.expand(-1, shape.channels, -1, -1),
        targets,
        samples.groups,
        samples.units,
    )


def fitted(samples: Samples, shape: Shape) -> Samples:
    """Return the examples in this shape: images in memory are ``reshaped``, others have
    it already.
    """
    return reshaped(samples, shape) if samples.as_bytes else samples


def per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Return a mean or std of pixels for so many channels: the average over the known
    channels; () stays ().
    """
    return (
        values
        if len(values) in (0, channels)
        else (sum(values) / len(values),) * channels
    )


def _luma(images: Tensor) -> Tensor:
    """Return RGB bytes as grey, (299 R + 587 G + 114 B) / 1000 rounded, in integers,
    equal on every machine.
    """
    red, green, blue = torch.split(images.to(torch.int32), 1, dim=1)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).to(torch.uint8)


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return uint8 images in the new size, computed in float32: torch's uint8 kernels
    round differently by CPU.
    """
    resized = F.interpolate(
        images.float(), size, mode="bilinear", align_corners=False, antialias=True
    )
    return resized.round_().clamp_(0, 255).to(torch.uint8)

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
    """Return the samples in this shape, computed ``chunk`` images at a time.

    RGB becomes grey by ITU-R 601 luma; grey is repeated over three channels without a
    copy. Images are resized bilinear with antialiasing, pixel targets to the nearest.
    """
    # What is not in memory has it: its files are decoded in this shape.
    size = (shape.height, shape.width)
    if not samples.in_memory:
        return samples
    inputs, targets = samples.inputs, samples.targets
    if inputs.shape[1:] == (shape.channels, *size):
        return samples
    # Fewer channels first, more last: one of them is resized, not three. In chunks, as
    # integers and floats take four times the memory of bytes.
    if shape.channels < inputs.shape[1]:
        inputs = torch.cat([_luma(part) for part in torch.split(inputs, chunk)])
    if inputs.shape[2:] != size:
        inputs = torch.cat(
            [_resized(part, size) for part in torch.split(inputs, chunk)]
        )
        if targets.ndim == 3:
            masks = targets.unsqueeze(1)
            targets = F.interpolate(masks, size, mode="nearest-exact").squeeze(1)
    inputs = inputs.expand(-1, shape.channels, -1, -1)
    return Samples(inputs, targets, samples.groups, samples.units)


def fitted(samples: Samples, shape: Shape) -> Samples:
    """Return the examples in this shape: rows and signals have none to change."""
    return reshaped(samples, shape) if samples.as_bytes else samples


def per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Return a mean or std of pixels for so many channels; () stays ()."""
    if len(values) in (0, channels):
        return values
    # For other channels than the known ones, the average of these.
    return (sum(values) / len(values),) * channels


def _luma(images: Tensor) -> Tensor:
    """Return RGB bytes as grey: (299 R + 587 G + 114 B) / 1000, rounded."""
    # In integers, so that every machine has the same bytes.
    red, green, blue = torch.split(images.to(torch.int32), 1, dim=1)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).to(torch.uint8)


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return uint8 images in the new size."""
    # Computed in float32: torch's kernels for uint8 round differently by CPU.
    resized = F.interpolate(
        images.float(), size, mode="bilinear", align_corners=False, antialias=True
    )
    return resized.round_().clamp_(0, 255).to(torch.uint8)

"""The registry's entry for a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

SIZES = {
    "rows": ("features",),
    "signals": ("channels", "length"),
    "build": ("channels", "size"),
    "volumes": ("channels", "depth", "height", "width"),
}
"""The sizes of an example for building a model, by the field of ``ModelInfo``."""

Rule = Callable[[int, int], tuple[int, int]]
"""From the (channels, size) of a data set's images to the model's own."""


def always(channels: int, size: int) -> Rule:
    """Return the rule of a model that takes only inputs of (channels, size)."""
    return lambda _, __: (channels, size)


def at_least(smallest: int, channels: int = 0) -> Rule:
    """Return the rule of a model that takes images of size ``smallest`` or larger.

    With ``channels`` 0, the model takes any number of channels.
    """
    return lambda given, size: (channels or given, max(size, smallest))


@dataclass(frozen=True)
class ModelInfo:
    """A model with BatchNorm, with its construction, inputs and outputs.

    The size is the height of the images; networks that do not need squares take any
    width.

    Attributes:
        summary: one line.
        source: the publication.
        build: ``build(num_classes, channels, size)`` returns the model for images.
        shape: ``shape(channels, size)`` returns the (channels, size) of its input for
            images of a data set.
        per_pixel: whether the model may have a vector of outputs for each pixel.
        smallest: the smallest size that a config may set by ``image-size``, below the
            size of ``shape``; 0 without such a size.
        rows: ``rows(num_classes, features)`` returns the model for rows of numbers;
            None if it takes no rows.
        signals: ``signals(num_classes, channels, length)`` returns the model for
            signals; None if it takes no signals.
        volumes: ``volumes(num_classes, channels, depth, height, width)`` returns the
            model for volumes; None if it takes no volumes.
    """

    summary: str
    source: str
    build: Callable[..., nn.Module]
    shape: Rule
    per_pixel: bool = False
    smallest: int = 0
    rows: Callable[..., nn.Module] | None = None
    signals: Callable[..., nn.Module] | None = None
    volumes: Callable[..., nn.Module] | None = None

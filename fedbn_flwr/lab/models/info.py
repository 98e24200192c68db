"""The registry's entry for a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

__all__ = ["SIZES", "ModelInfo", "always", "at_least"]

SIZES = {
    "rows": ("features",),
    "signals": ("channels", "length"),
    "build": ("channels", "size"),
    "volumes": ("channels", "depth", "height", "width"),
}
"""The sizes of an example that a model is built from, by the field of ``ModelInfo``."""

Rule = Callable[[int, int], tuple[int, int]]
"""From the (channels, size) of a data set's images to those that a model takes."""


def always(channels: int, size: int) -> Rule:
    """Return the rule of a model whose input is the same for every data set."""
    return lambda _, __: (channels, size)


def at_least(smallest: int, channels: int = 0) -> Rule:
    """Return the rule of a model for images of this size or more; 0 = any channels."""
    return lambda given, size: (channels or given, max(size, smallest))


@dataclass(frozen=True)
class ModelInfo:
    """A model with BatchNorm: how it is built, and what it takes and gives.

    The size is the height of the images; networks that do not need squares take any
    width.

    Attributes:
        summary: one line.
        source: the publication.
        build: ``build(num_classes, channels, size)`` returns the model for images;
            None = it takes none.
        shape: ``shape(channels, size)`` returns the (channels, size) of its input for
            images of a data set.
        per_pixel: whether there is a vector of outputs per pixel, not per example;
            None = not known (a user's model).
        smallest: a size below that of ``shape`` at which the network also works; a
            config must ask for it (``image-size``). 0 = none.
        rows: ``rows(num_classes, features)`` returns the model for rows of numbers;
            None = it takes none.
        signals: ``signals(num_classes, channels, length)`` returns the model for
            signals; None = it takes none.
        volumes: ``volumes(num_classes, channels, depth, height, width)`` returns the
            model for volumes; None = it takes none.
    """

    summary: str
    source: str
    build: Callable[..., nn.Module] | None
    shape: Rule
    per_pixel: bool | None = False
    smallest: int = 0
    rows: Callable[..., nn.Module] | None = None
    signals: Callable[..., nn.Module] | None = None
    volumes: Callable[..., nn.Module] | None = None

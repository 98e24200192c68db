"""The registry's entry for a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from fedbn_flwr.training.tasks import CLASSIFICATION, Task

__all__ = ["ModelInfo"]


@dataclass(frozen=True)
class ModelInfo:
    """A model: ``build(num_classes, channels, size)`` with BatchNorm, ``shape(channels, size)`` of its input, its task.

    The size is the height of the images; networks that do not need squares take any width. ``smallest`` is a size below
    that of ``shape`` at which the network also works; a config must ask for it (``image-size``). 0 = none.
    """

    summary: str
    source: str
    build: Callable[[int, int, int], nn.Module]
    shape: Callable[[int, int], tuple[int, int]]
    task: Task = CLASSIFICATION
    smallest: int = 0

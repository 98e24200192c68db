"""What the registry of models holds about one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

__all__ = ["ModelInfo"]


@dataclass(frozen=True)
class ModelInfo:
    """A model: ``build(num_classes, channels, size)`` with BatchNorm, and ``shape(channels, size)`` of its input."""

    summary: str
    source: str
    build: Callable[[int, int, int], nn.Module]
    shape: Callable[[int, int], tuple[int, int]]

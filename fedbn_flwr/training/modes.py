"""Keeping the train and eval modes of a model's modules. Torch only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["kept_modes"]


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Restore every module's train or eval mode at the end of the block."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode

"""Train and eval modes for a block of code. Torch only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["in_eval_mode", "restored_modes"]


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Restore every module's train or eval mode at the end of the block."""
    modes = [(module, module.training) for module in model.modules()]
    trains = model.training
    try:
        yield
    finally:
        # First let layers act that change their weights with the mode (LoRA). Then
        # restore the modes one by one, because they may differ.
        model.train(trains)
        for module, mode in modes:
            module.training = mode


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, and restore its modes at the end."""
    with restored_modes(model):
        model.eval()
        yield

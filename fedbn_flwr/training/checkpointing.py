"""Activation checkpointing: a part of a model runs a second time, in the backward pass.
Torch only.

What a method measures of such a part counts once, in the first pass.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

__all__ = ["in_checkpoint", "is_recomputed"]


def in_checkpoint() -> bool:
    """Return whether the present call comes from ``torch.utils.checkpoint``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def is_recomputed() -> bool:
    """Return whether the present call of a layer is in a backward pass: it is the
    second one for the same input.
    """
    return torch._C._current_graph_task_id() != -1

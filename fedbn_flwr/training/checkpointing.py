"""Detection of activation checkpointing.

A checkpointed part of a model runs a second time, in the backward pass. A method
counts its measurements of such a part only once, in the first pass. Torch only.
"""

from __future__ import annotations

import sys
from types import FrameType


def in_checkpoint() -> bool:
    """Return whether the current call comes from ``torch.utils.checkpoint``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False

"""Facts about the calls of a single layer.

A layer may have replaced methods, an own forward pass, or checkpoints. Torch only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def replace_method(
    module: nn.Module, name: str, function: Callable[..., Any]
) -> Callable[[], None]:
    """Replace the method ``name`` of this module by ``function``.

    Other modules of the class do not change. A second model gets the method as well if
    it is a ``functools.partial`` with the module as first argument (``copy_modes``).

    Returns:
        The function that undoes the change. It restores the method of the class or an
        earlier replacement.
    """
    before = vars(module).get(name)
    setattr(module, name, function)

    def undo() -> None:
        # Delete the attribute of the object, so that the method of the class is used
        # again.
        delattr(module, name)
        if before is not None:
            setattr(module, name, before)

    return undo


def has_own_forward(layer: _BatchNorm) -> bool:
    """Return whether a layer computes something else than torch's BatchNorm.

    Such a subclass may scale, mask or split its input, or apply an activation. So it
    normalises something else than its input, and a replacement would lose a part of it.
    """
    # A method or a compiler may have replaced the forward pass of this object.
    if "forward" in vars(layer):
        return True
    kind = type(layer)
    of_torch = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return kind.forward not in of_torch or kind.__call__ is not nn.Module.__call__


def in_checkpoint() -> bool:
    """Return whether the current call comes from ``torch.utils.checkpoint``.

    A checkpointed part of a model runs a second time, in the backward pass. A method
    counts its measurements of such a part only once, in the first pass.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False

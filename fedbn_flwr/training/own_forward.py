"""Subclasses of BatchNorm whose forward pass is not torch's.

Such a subclass may scale, mask or split its input, or apply an activation. So its input
is not what it normalises, and a replacement would lose a part of it.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["has_own_forward"]


def has_own_forward(layer: _BatchNorm) -> bool:
    """Return whether a layer computes something else than torch's BatchNorm."""
    # A method or a compiler may have replaced the forward pass of this object.
    if "forward" in vars(layer):
        return True
    kind = type(layer)
    of_torch = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return kind.forward not in of_torch or kind.__call__ is not nn.Module.__call__

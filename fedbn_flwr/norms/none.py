"""``norm=none``: BatchNorm removed, nothing put in its place.

Each layer becomes ``nn.Identity``: no scale and no shift, so a convolution that left its bias to BatchNorm has none
afterwards (no bias is added here). Residual networks without any normalisation may diverge at the usual learning rates:
this kind is the bare control, not a method.

Source: ours (a control).
"""

from __future__ import annotations

from torch import nn

from fedbn_flwr.norms.report import Replacement
from fedbn_flwr.norms.swap import swap_batchnorm

__all__ = ["remove_batch"]


def remove_batch(model: nn.Module) -> tuple[nn.Module, tuple[Replacement, ...]]:
    """Replace every BatchNorm layer by ``nn.Identity``, in place; see ``swap_batchnorm``."""
    return swap_batchnorm(model, lambda layer, path: nn.Identity())

"""``norm=none`` removes BatchNorm without a replacement.

Each layer becomes ``nn.Identity``, without scale and shift. Convolutions without a bias
get no bias, even if the reason was BatchNorm. Residual networks without normalisation
may diverge at the usual learning rates: this norm is a control, not a method.

Source: ours (a control).
"""

from __future__ import annotations

from torch import nn

from fedbn_flwr.norms.swap import swap_batchnorm


def remove_batch(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm layer by ``nn.Identity``, in place."""
    return swap_batchnorm(model, lambda layer, path: nn.Identity())

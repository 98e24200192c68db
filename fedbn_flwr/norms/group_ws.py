"""``norm=group+ws`` is GroupNorm after convolutions with standardised weights.

Instead of a filter W of n weights (one out channel, its in channels and positions), the
layer uses (W - mean) / (std + 1e-5), with std^2 = sum (W - mean)^2 / (n - 1). A
convolution is standardised only if its output goes only to norm layers.

Source: Qiao et al. 2019, arXiv:1903.10520, and the authors' README (unbiased std, 1e-5
outside the root, "only replace convolutional layers that are followed by normalization
layers"); GroupNorm as in ``group``.

Ours: the meaning of "followed by", see ``wiring`` (in a pre-activation network: only
the convolutions inside a block). We standardise 1d and 3d convolutions as well. Filters
of one weight are not standardised, because they would be zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedbn_flwr.norms.convolution import (
    DerivedWeightConv,
    become,
    fan_in,
    plain_convolutions,
    refuse_unusual,
)
from fedbn_flwr.norms.group import use_group
from fedbn_flwr.norms.wiring import wiring

EPS = 1e-5


class _Standardised(DerivedWeightConv):
    def derived_weight(self) -> Tensor:
        """Return (weight - mean) / (std + 1e-5), with each filter's unbiased std."""
        axes = tuple(range(1, self.weight.dim()))
        std, mean = torch.std_mean(self.weight, axes, correction=1, keepdim=True)
        return (self.weight - mean) / (std + EPS)


class StandardisedConv1d(_Standardised, nn.Conv1d):
    """Conv1d with standardised filters."""


class StandardisedConv2d(_Standardised, nn.Conv2d):
    """Conv2d with standardised filters."""


class StandardisedConv3d(_Standardised, nn.Conv3d):
    """Conv3d with standardised filters."""


def use_group_ws(model: nn.Module, *, groups: int = 2) -> nn.Module:
    """Replace BatchNorm by GroupNorm, and standardise convolutions, in place.

    A convolution is standardised if its output goes only to norm layers.

    Raises:
        NormLayerError: channels are not divisible by ``groups``, or ``refuse_unusual``
            refuses a convolution.
    """
    # Read the wiring before the norms are replaced, because it refers to BatchNorm
    # layers.
    after = wiring(model).norms_after
    chosen = {}
    for path, conv in plain_convolutions(model).items():
        if after.get(id(conv)) and fan_in(conv) > 1:
            chosen[path] = conv
    refuse_unusual(chosen, "weight standardisation (norm='group+ws')")
    model = use_group(model, groups=groups, kind="group+ws")
    kinds = (StandardisedConv1d, StandardisedConv2d, StandardisedConv3d)
    become(chosen, kinds, lambda conv: None)
    return model

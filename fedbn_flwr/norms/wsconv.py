"""``norm=wsconv`` replaces normalisation by scaled standardised filters.

Instead of a filter W of N weights (N = in channels per group times positions), it uses

    W' = gain * gamma * (W - mean) / (sqrt(var + 1e-6) * sqrt(N)),    var = sum (W - mean)^2 / N.

gamma is a constant of the activation (1 / the standard deviation of its output for a
standard normal input). gain is 1, or with ``gain=True`` a learnable number per out
channel that starts at 1. Every BatchNorm becomes ``nn.Identity``. A convolution or
linear layer without a bias gets a bias, starting at 0, if it comes before a BatchNorm
with beta. Linear layers do not change otherwise.

Sources: FedWon, eq. (3); Brock et al. 2021a, arXiv:2101.08692. 1e-6 is inside the root
as in timm's ``ScaledStdConv2d``; with the same gamma both layers are equal.

Ours: gamma is exact (for ReLU 1.71286; the NFNets code has the sampled constant
1.71396). The learnable gain is Brock's; eq. (3) has none. 1d and 3d convolutions are
changed as well. The weights of transposed convolutions do not change, nor do filters of
one weight, because they would become zero. Layers keep an existing bias.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.errors import unknown_name
from fedbn_flwr.norms.convolution import (
    DerivedWeightConv,
    become,
    fan_in,
    plain_convolutions,
    refuse_unusual,
)
from fedbn_flwr.norms.swap import swap_batchnorm
from fedbn_flwr.norms.wiring import num_outputs, wiring

EPS = 1e-6
GAMMAS: dict[str, float] = {
    "identity": 1.0,
    "relu": math.sqrt(2 / (1 - 1 / math.pi)),
    # The others are integrals over the standard normal density; leaky_relu has slope
    # 0.01, elu and celu alpha 1.
    "celu": 1.2708434178501964,
    "elu": 1.2708434178501964,
    "gelu": 1.700926243363333,
    "hardswish": 1.8138714738131823,
    "leaky_relu": 1.7048316271773367,
    "mish": 1.592025381099446,
    "relu6": 1.712858554972395,
    "selu": 1.0,
    "sigmoid": 4.801313372039966,
    "silu": 1.7871872221004421,
    "softplus": 1.9191259801076566,
    "softsign": 2.3375333631085398,
    "tanh": 1.5925374197228312,
}


class _Scaled(DerivedWeightConv):
    gain: nn.Parameter | None
    gamma: float

    def derived_weight(self) -> Tensor:
        """Return gain * gamma * (weight - mean) / sqrt((var + 1e-6) * fan-in).

        A filter of equal weights becomes 0.
        """
        # layer_norm standardises each filter separately, and returns contiguous
        # filters.
        standardised = F.layer_norm(self.weight, self.weight.shape[1:], eps=EPS)
        # Keep filters in channels-last, because the kernel of the convolution needs
        # this format. With one channel, only the strides reveal the format. With one
        # position, nothing reveals it.
        weight = self.weight
        if weight.dim() == 4 and weight.stride(1) == 1 and weight[0, 0].numel() > 1:
            standardised = standardised.clone(memory_format=torch.channels_last)
        scale = self.gamma / math.sqrt(fan_in(self))
        return standardised * (scale if self.gain is None else self.gain * scale)

    def extra_repr(self) -> str:
        """Return the convolution's description and gamma."""
        described = str(super().extra_repr())  # type: ignore[no-untyped-call]
        return f"{described}, gamma={self.gamma:.5g}, gain={self.gain is not None}"


class ScaledConv1d(_Scaled, nn.Conv1d):
    """Conv1d with scaled standardised filters."""


class ScaledConv2d(_Scaled, nn.Conv2d):
    """Conv2d with scaled standardised filters."""


class ScaledConv3d(_Scaled, nn.Conv3d):
    """Conv3d with scaled standardised filters."""


def use_wsconv(
    model: nn.Module, *, activation: str = "relu", gain: bool = False
) -> nn.Module:
    """Remove BatchNorm, and make convolutions scaled and standardised, in place.

    Filters with a single weight do not change. If BatchNorm's beta was the bias of a
    layer, the layer gets a bias.

    Args:
        model: any model; the convolutions change even without BatchNorm.
        activation: a key of ``GAMMAS``, the model's activation; all filters use its
            gamma.
        gain: whether each out channel has a learnable gain (with the weight's
            ``requires_grad``).

    Raises:
        ConfigError: the activation is unknown.
        NormLayerError: ``refuse_unusual`` refuses a convolution; or a BatchNorm
            does more than torch's.
    """
    if activation not in GAMMAS:
        raise unknown_name("activation", activation, GAMMAS)
    convolutions = {}
    for path, conv in plain_convolutions(model).items():
        # Skip filters of one weight, because standardisation would make them zero.
        if fan_in(conv) > 1:
            convolutions[path] = conv
    refuse_unusual(convolutions, "scaled weight standardisation (norm='wsconv')")

    # Find the layers whose bias was BatchNorm's beta before BatchNorm is removed.
    after = wiring(model).norms_after
    shifted: list[Any] = []
    for layer in model.modules():
        for norm in after.get(id(layer), ()):
            if layer.bias is not None or norm.bias is None:
                continue
            if norm.num_features == num_outputs(layer):
                shifted.append(layer)

    model = swap_batchnorm(model, lambda layer, path: nn.Identity())
    for layer in shifted:
        zeros = layer.weight.new_zeros(num_outputs(layer))
        layer.bias = nn.Parameter(zeros, requires_grad=layer.weight.requires_grad)

    def prepare(conv: _ConvNd) -> None:
        ones = None
        if gain:
            shape = (conv.out_channels, *[1] * (conv.weight.dim() - 1))
            learns = conv.weight.requires_grad
            ones = nn.Parameter(conv.weight.new_ones(shape), requires_grad=learns)
        conv.register_parameter("gain", ones)
        # torch declares every attribute of a module as a tensor or a module. This
        # attribute is a number.
        conv.gamma = GAMMAS[activation]  # type: ignore[assignment]

    kinds = (ScaledConv1d, ScaledConv2d, ScaledConv3d)
    become(convolutions, kinds, prepare)
    return model

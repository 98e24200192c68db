"""``norm=group``, ``layer`` and ``instance`` use statistics of an example.

An example has C channels in G groups. Over the m values of a group (C/G channels times
all positions): mean = sum x / m, var = sum (x - mean)^2 / m, y = gamma * (x - mean) /
sqrt(var + eps) + beta, with gamma and beta per channel. Running statistics do not
exist; training and evaluation do the same computation.

Sources: group: Wu & He 2018, arXiv:1803.08494, with two groups as in Zhong et al. 2023,
arXiv:2303.06530, B.4; layer: Ba et al. 2016, arXiv:1607.06450; instance: Ulyanov et al.
2016, arXiv:1607.08022.

Differs from the papers: ``layer`` is G = 1, with gamma and beta per channel instead of
per position.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms.replaced_layers import shown_path
from fedbn_flwr.norms.swap import batchnorm_places, swap_batchnorm


class CheckedGroupNorm(nn.GroupNorm):
    """GroupNorm that refuses groups of one value, since their output would be beta.

    It replaces one BatchNorm layer and keeps that layer's gamma and beta parameters, so
    their values, dtype, device, ``requires_grad`` and ties to other layers do not
    change.
    """

    def __init__(self, layer: _BatchNorm, groups: int, path: str) -> None:
        """Take ``layer``'s gamma, beta and eps, and ``path`` for messages."""
        # Use affine=False, so that no parameters are created: the layer's own are used.
        super().__init__(groups, layer.num_features, eps=layer.eps, affine=False)
        self.affine = layer.affine
        self.weight, self.bias = layer.weight, layer.bias
        self.path = path

    def forward(self, input: Tensor) -> Tensor:
        """Normalise an input (N, C, *).

        Raises:
            NormLayerError: a group has one value, for example with one channel per
                group and an input (N, C).
        """
        channels = self.num_channels // self.num_groups
        if input.dim() >= 2 and channels * math.prod(input.shape[2:]) == 1:
            raise NormLayerError(
                f"the norm layer at {shown_path(self.path)}: an input of shape"
                f" {tuple(input.shape)} in {self.num_groups} groups has one value per"
                " group, so the output would always be beta. Use norm='group' with"
                " fewer groups or norm='layer'."
            )
        return super().forward(input)


def use_group(model: nn.Module, *, groups: int = 2, kind: str = "group") -> nn.Module:
    """Replace every BatchNorm layer by GroupNorm with ``groups`` groups, in place.

    See ``swap_batchnorm``. ``kind`` is the norm's name in messages.

    Raises:
        NormLayerError: the channels of a layer are not divisible by ``groups``; the
            message names all such layers.
    """
    places = batchnorm_places(model)
    bad = [(path, layer) for path, layer, _, _ in places if layer.num_features % groups]
    if bad:
        names = ", ".join(
            f"{shown_path(path)} ({layer.num_features} channels)" for path, layer in bad
        )
        common = math.gcd(*(place.layer.num_features for place in places))
        fitting = ", ".join(str(g) for g in range(1, common + 1) if common % g == 0)
        raise NormLayerError(
            f"norm {kind!r} with groups={groups}: the channels are not divisible by"
            f" {groups} in {names}. These numbers of groups fit every layer: {fitting}."
        )
    return swap_batchnorm(
        model, lambda layer, path: CheckedGroupNorm(layer, groups, path)
    )


def use_layer(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm layer by GroupNorm with one group, in place."""
    return swap_batchnorm(model, lambda layer, path: CheckedGroupNorm(layer, 1, path))


def use_instance(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm layer by GroupNorm with a group per channel, in place.

    A layer with one position per channel, such as after a linear layer, raises
    NormLayerError in its first forward.
    """
    return swap_batchnorm(
        model, lambda layer, path: CheckedGroupNorm(layer, layer.num_features, path)
    )

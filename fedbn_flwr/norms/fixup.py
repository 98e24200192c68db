"""``norm=fixup``: a residual network without normalisation, with an initialisation that
lets it train.

Each of the L residual branches has m convolutions. The last convolution starts at zero,
the others have He's scale times L^(-1/(2m-2)). Every BatchNorm becomes a scalar bias
(0); the last one of a branch becomes a scalar multiplier (1) and a bias. Every
convolution of a block and the classifier get a scalar bias (0) before them. The
classifier's weight and bias are zero. The stem's convolution is unchanged; its
BatchNorm becomes a scalar bias. BatchNorm on a shortcut is removed.

Source: Zhang et al. 2019, arXiv:1901.09321, section 3 ("Fixup initialization"), and the
authors' code.

Differs from the paper: weights are not drawn again. Each filter bank keeps its values,
scaled to a root mean square of exactly sqrt(2 / fan-out) (fan-out = out channels times
positions, as in the authors' code), so the start depends only on the given model. A
convolution on a shortcut keeps its weight (torchvision's have He's scale) and gets its
own bias before it; the authors' code uses the first bias of the branch. Option A
shortcuts have no bias.

Only for networks of blocks like torchvision's ``BasicBlock`` and ``Bottleneck`` and
ours: a block has ``conv1``, ``conv2`` and so on, each with its norm layer ``bn1`` or
``norm1`` after it, and adds the last one to the shortcut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms.convolution import in_model_order, refuse_unusual
from fedbn_flwr.norms.report import Replacement, shown_path
from fedbn_flwr.norms.swap import batchnorm_places, describe, swap_batchnorm
from fedbn_flwr.norms.wiring import Wiring, wiring

__all__ = ["BiasedConv2d", "BiasedLinear", "ScalarBias", "ScalarScale", "use_fixup"]


class ScalarBias(nn.Module):
    """x + bias, one number for all channels."""

    def __init__(self, bias: nn.Parameter) -> None:
        """Set ``bias`` (1,)."""
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum, in the shape of ``x``."""
        return x + self.bias


class ScalarScale(nn.Module):
    """x * scale + bias, one number each for all channels."""

    def __init__(self, scale: nn.Parameter, bias: nn.Parameter) -> None:
        """Set ``scale`` and ``bias``, each (1,)."""
        super().__init__()
        self.scale, self.bias = scale, bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the result, in the shape of ``x``."""
        return x * self.scale + self.bias


class BiasedConv2d(nn.Conv2d):
    """A convolution of x + bias_before; a Conv2d becomes one in place."""

    bias_before: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """Convolve an input (N, in, H, W)."""
        return super().forward(input + self.bias_before)


class BiasedLinear(nn.Linear):
    """A linear layer on x + bias_before; a Linear becomes one in place."""

    bias_before: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """Map an input (N, in)."""
        return super().forward(input + self.bias_before)


@dataclass(frozen=True)
class _Block:
    branch: tuple[nn.Conv2d, ...]
    norms: tuple[_BatchNorm, ...]
    shortcut: tuple[nn.Conv2d, ...]
    shortcut_norms: tuple[_BatchNorm, ...]


def use_fixup(model: nn.Module) -> tuple[nn.Module, tuple[Replacement, ...]]:
    """Replace every BatchNorm of a residual network and initialise it as Fixup does, in
    place.

    New parameters have the dtype, device and ``requires_grad`` of their layer.

    Raises:
        NormLayerError: the model is not such a network; the message names the reason.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    known = wiring(model)
    blocks = [
        block
        for module in model.modules()
        if (block := _block(module, known)) is not None
    ]
    head = next(
        (m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear)), None
    )
    _refuse_others(model, blocks, head, known)
    biased = [conv for block in blocks for conv in (*block.branch, *block.shortcut)]
    layers: list[nn.Conv2d | nn.Linear] = [*biased]
    if head is not None:
        layers.append(head)
    refuse_unusual(
        {paths[id(layer)]: layer for layer in layers}, "a scalar bias (norm='fixup')"
    )
    last = {id(block.norms[-1]) for block in blocks}
    on_shortcut = {id(norm) for block in blocks for norm in block.shortcut_norms}
    fallback = next(model.parameters())

    def replacement(layer: _BatchNorm, path: str) -> nn.Module:
        like = fallback if layer.weight is None else layer.weight
        if id(layer) in on_shortcut:
            return nn.Identity()
        if id(layer) in last:
            return ScalarScale(_scalar(1, like), _scalar(0, like))
        return ScalarBias(_scalar(0, like))

    for block in blocks:
        _start(block.branch, len(blocks))
    order = [path for path, _ in model.named_modules(remove_duplicate=False)]
    old = {path: describe(m) for path, m in model.named_modules(remove_duplicate=False)}
    model, norms = swap_batchnorm(model, replacement)
    for layer in layers:
        layer.register_parameter("bias_before", _scalar(0, layer.weight))
        layer.__class__ = BiasedLinear if isinstance(layer, nn.Linear) else BiasedConv2d
    if head is not None:
        with torch.no_grad():
            head.weight.zero_()
            if head.bias is not None:
                head.bias.zero_()
    changed = {id(layer) for layer in layers}
    modules = model.named_modules(remove_duplicate=False)
    rows = [
        Replacement(path, old[path], describe(m))
        for path, m in modules
        if id(m) in changed
    ]
    return model, in_model_order(order, norms, rows)


def _scalar(value: float, like: Tensor) -> nn.Parameter:
    return nn.Parameter(
        torch.full((1,), value, dtype=like.dtype, device=like.device),
        like.requires_grad,
    )


@torch.no_grad()
def _start(branch: tuple[nn.Conv2d, ...], num_branches: int) -> None:
    factor = num_branches ** (-1 / (2 * len(branch) - 2))
    for conv in branch[:-1]:
        root_mean_square = conv.weight.square().mean().sqrt()
        he = math.sqrt(2 / (conv.out_channels * conv.weight[0, 0].numel()))
        conv.weight.mul_(
            factor
            * he
            / root_mean_square.clamp(min=torch.finfo(conv.weight.dtype).tiny)
        )
    branch[-1].weight.zero_()
    if branch[-1].bias is not None:
        branch[-1].bias.zero_()


def _block(module: nn.Module, known: Wiring) -> _Block | None:
    """Return the layers of a residual block; None if ``module`` is not one."""
    branch: list[nn.Conv2d] = []
    norms: list[_BatchNorm] = []
    while isinstance(
        conv := getattr(module, f"conv{len(branch) + 1}", None), nn.Conv2d
    ):
        number = len(branch) + 1
        norm = getattr(module, f"bn{number}", getattr(module, f"norm{number}", None))
        if not isinstance(norm, _BatchNorm) or known.norms_after.get(id(conv)) != (
            norm,
        ):
            return None
        branch.append(conv)
        norms.append(norm)
    if len(branch) < 2 or id(norms[-1]) not in known.added:
        return None
    inside = {id(layer) for layer in (*branch, *norms)}
    others = [
        m
        for m in module.modules()
        if isinstance(m, _ConvNd | _BatchNorm) and id(m) not in inside
    ]
    convs = tuple(m for m in others if isinstance(m, nn.Conv2d))
    shortcut_norms = tuple(m for m in others if isinstance(m, _BatchNorm))
    ends = {id(norm) for conv in convs for norm in known.norms_after.get(id(conv), ())}
    if len(convs) + len(shortcut_norms) != len(others) or ends != {
        id(norm) for norm in shortcut_norms
    }:
        return None
    return _Block(tuple(branch), tuple(norms), convs, shortcut_norms)


def _refuse_others(
    model: nn.Module, blocks: list[_Block], head: nn.Linear | None, known: Wiring
) -> None:
    inside = {
        id(norm) for block in blocks for norm in (*block.norms, *block.shortcut_norms)
    }
    outside = [
        place for place in batchnorm_places(model) if id(place.layer) not in inside
    ]
    after_conv = {id(norm) for norms in known.norms_after.values() for norm in norms}
    strays = [
        shown_path(p.path)
        for k, p in enumerate(outside)
        if k > 0 or id(p.layer) not in after_conv
    ]
    if not blocks:
        problem = (
            "it has no block of convolutions conv1, conv2, ..., each followed by its"
            " BatchNorm, with a shortcut"
        )
    elif strays:
        problem = (
            "BatchNorm is neither in a residual block nor after the stem's"
            f" convolution: {', '.join(strays)}"
        )
    elif head is None:
        problem = "it has no linear classifier"
    else:
        return
    raise NormLayerError(
        "norm 'fixup' is for residual networks as resnet20 or torchvision:resnet18"
        f" only; {type(model).__name__} is not one: {problem}. Use another norm, e.g."
        " norm='wsconv' or norm='group'."
    )

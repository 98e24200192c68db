"""``norm=fixup`` makes a residual network that trains without normalisation.

A special start makes this possible. Each of the L residual branches has m convolutions.
The last convolution starts at zero, the others have He's scale times L^(-1/(2m-2)).
Every BatchNorm becomes a scalar bias (0); the last BatchNorm of a branch becomes a
scalar multiplier (1) and a bias. Every convolution of a block and the classifier get a
scalar bias (0) before them. The classifier's weight and bias are zero. The stem's
convolution does not change; its BatchNorm becomes a scalar bias. BatchNorm on a
shortcut is removed.

Source: Zhang et al. 2019, arXiv:1901.09321, section 3 ("Fixup initialization"), and the
authors' code.

Differs from the paper: weights are not drawn again. Each filter bank keeps its values,
scaled to a root mean square of exactly sqrt(2 / fan-out) (fan-out = out channels times
positions, as in the authors' code), so the start depends only on the given model. A
convolution on a shortcut keeps its weight (torchvision's have He's scale) and gets its
own bias before it; the authors' code uses the first bias of the branch. Option A
shortcuts have no bias.

It works only for networks of blocks like torchvision's ``BasicBlock`` and
``Bottleneck`` and ours: a block has ``conv1``, ``conv2`` and so on, each followed by
its norm layer ``bn1`` or ``norm1``, and adds the output of the last norm layer to the
shortcut.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms.convolution import refuse_unusual
from fedbn_flwr.norms.replaced_layers import shown_path
from fedbn_flwr.norms.swap import batchnorm_places, swap_batchnorm
from fedbn_flwr.norms.wiring import Wiring, wiring


class ScalarBias(nn.Module):
    """x + bias, with one number for all channels."""

    def __init__(self, bias: nn.Parameter) -> None:
        """Set ``bias`` (1,)."""
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum, in the shape of ``x``."""
        return x + self.bias


class ScalarScale(nn.Module):
    """x * scale + bias, with one number each for all channels."""

    def __init__(self, scale: nn.Parameter, bias: nn.Parameter) -> None:
        """Set ``scale`` and ``bias``, each (1,)."""
        super().__init__()
        self.scale, self.bias = scale, bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the result, in the shape of ``x``."""
        return x * self.scale + self.bias


class BiasedConv2d(nn.Conv2d):
    """A convolution of x + bias_before, converted in place from a Conv2d."""

    bias_before: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """Convolve an input (N, in, H, W)."""
        return super().forward(input + self.bias_before)


class BiasedLinear(nn.Linear):
    """A linear layer on x + bias_before, converted in place from a Linear."""

    bias_before: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """Map an input (N, in)."""
        return super().forward(input + self.bias_before)


@dataclass(frozen=True)
class _Block:
    """The layers of a residual block, in the order of the forward pass."""

    branch: tuple[nn.Conv2d, ...]
    norms: tuple[_BatchNorm, ...]
    shortcut: tuple[nn.Conv2d, ...]
    shortcut_norms: tuple[_BatchNorm, ...]


def use_fixup(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm of a residual network by Fixup's scalars, in place.

    The weights get Fixup's start. New parameters have the dtype, device and
    ``requires_grad`` of their layer.

    Raises:
        NormLayerError: the model is not a network of this form; the message names the
            reason.
    """
    # Find the blocks and the classifier, and refuse any other network.
    paths = {id(module): path for path, module in model.named_modules()}
    known = wiring(model)
    blocks, head = [], None
    for module in model.modules():
        block = _block(module, known)
        if block is not None:
            blocks.append(block)
        if isinstance(module, nn.Linear):
            head = module
    _refuse_others(model, blocks, head, known)
    layers: list[nn.Conv2d | nn.Linear] = []
    for block in blocks:
        layers += [*block.branch, *block.shortcut]
    if head is not None:
        layers.append(head)
    named_layers = {paths[id(layer)]: layer for layer in layers}
    refuse_unusual(named_layers, "a scalar bias (norm='fixup')")

    # Choose the replacement of each BatchNorm by its place in a block.
    last = {id(block.norms[-1]) for block in blocks}
    on_shortcut = {id(norm) for block in blocks for norm in block.shortcut_norms}
    fallback = blocks[0].branch[0].weight

    def replacement(layer: _BatchNorm, path: str) -> nn.Module:
        like = fallback if layer.weight is None else layer.weight
        if id(layer) in on_shortcut:
            return nn.Identity()
        if id(layer) in last:
            return ScalarScale(_scalar(1, like), _scalar(0, like))
        return ScalarBias(_scalar(0, like))

    # Start the branches, replace the norms, and give the layers their scalar bias.
    for block in blocks:
        _start(block.branch, len(blocks))
    model = swap_batchnorm(model, replacement)
    for layer in layers:
        layer.register_parameter("bias_before", _scalar(0, layer.weight))
        layer.__class__ = BiasedLinear if isinstance(layer, nn.Linear) else BiasedConv2d
    if head is not None:
        with torch.no_grad():
            head.weight.zero_()
            if head.bias is not None:
                head.bias.zero_()
    return model


def _scalar(value: float, like: Tensor) -> nn.Parameter:
    values = torch.full((1,), value, dtype=like.dtype, device=like.device)
    return nn.Parameter(values, like.requires_grad)


@torch.no_grad()
def _start(branch: tuple[nn.Conv2d, ...], num_branches: int) -> None:
    """Scale a branch's filters to He's scale times L^(-1/(2m-2)), the last to zero."""
    factor = num_branches ** (-1 / (2 * len(branch) - 2))
    for conv in branch[:-1]:
        root_mean_square = conv.weight.square().mean().sqrt()
        he = math.sqrt(2 / (conv.out_channels * conv.weight[0, 0].numel()))
        # Filters that are all zero stay zero and do not become NaN.
        tiny = torch.finfo(conv.weight.dtype).tiny
        conv.weight.mul_(factor * he / root_mean_square.clamp(min=tiny))
    branch[-1].weight.zero_()
    if branch[-1].bias is not None:
        branch[-1].bias.zero_()


def _block(module: nn.Module, known: Wiring) -> _Block | None:
    """Return the layers of a residual block, or None if ``module`` is not one."""
    # The branch consists of conv1, conv2, ..., each followed only by its norm.
    branch = []
    norms = []
    for number in itertools.count(1):
        conv = getattr(module, f"conv{number}", None)
        if not isinstance(conv, nn.Conv2d):
            break
        norm = getattr(module, f"bn{number}", getattr(module, f"norm{number}", None))
        if not isinstance(norm, _BatchNorm):
            return None
        if known.norms_after.get(id(conv)) != (norm,):
            return None
        branch.append(conv)
        norms.append(norm)
    # The end of the branch is added to the shortcut.
    if len(branch) < 2 or id(norms[-1]) not in known.added:
        return None

    # All other layers belong to the shortcut: its convolutions, and the norms after
    # them.
    inside = {id(layer) for layer in (*branch, *norms)}
    convs = []
    shortcut_norms = []
    for layer in module.modules():
        if id(layer) in inside:
            continue
        if isinstance(layer, nn.Conv2d):
            convs.append(layer)
        elif isinstance(layer, _BatchNorm):
            shortcut_norms.append(layer)
        elif isinstance(layer, _ConvNd):
            return None
    ends = {id(norm) for conv in convs for norm in known.norms_after.get(id(conv), ())}
    if ends != {id(norm) for norm in shortcut_norms}:
        return None
    return _Block(tuple(branch), tuple(norms), tuple(convs), tuple(shortcut_norms))


def _refuse_others(
    model: nn.Module, blocks: list[_Block], head: nn.Linear | None, known: Wiring
) -> None:
    """Raise NormLayerError for a network of another form, and name the reason."""
    inside = set[int]()
    for block in blocks:
        inside.update(map(id, (*block.norms, *block.shortcut_norms)))
    after_conv = {id(norm) for norms in known.norms_after.values() for norm in norms}
    outside = [
        place for place in batchnorm_places(model) if id(place.layer) not in inside
    ]
    # The first BatchNorm outside the blocks may belong to the stem, if it follows a
    # convolution.
    strays = []
    for k, place in enumerate(outside):
        if k > 0 or id(place.layer) not in after_conv:
            strays.append(shown_path(place.path))
    # Report only the first reason, because without blocks all norms are strays.
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
        "norm 'fixup' is only for residual networks such as resnet20 or"
        f" torchvision:resnet18. {type(model).__name__} is not one: {problem}. Use"
        " another norm, such as norm='wsconv' or norm='group'."
    )

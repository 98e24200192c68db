"""BatchNorm folded into the convolution or linear layer before it. Torch only.

In eval mode, BatchNorm is a scale and a shift per channel, y = a * x + b, a = gamma /
sqrt(var + eps), b = beta - a * mean. After a layer x = W u + c, both together are one
layer with the weight a * W and the bias a * c + b. Batch renormalisation is BatchNorm
in eval mode. A subclass that is BatchNorm and then its own modules, as timm's
``BatchNormAct2d`` with ``drop`` and ``act``, leaves these modules in its place. Filters
that are derived from a weight (``norm=wsconv``, ``group+ws``) become plain weights.

The order of the layers comes from a forward pass, never from names. The outputs show
whether a BatchNorm can be folded: they would change if the model also uses the layer's
output or weight elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights
from torch.utils._pytree import tree_leaves

from fedbn_flwr.norms.convolution import DerivedWeightConv
from fedbn_flwr.norms.replaced_layers import shown_path
from fedbn_flwr.training.model_state import copied

_PLAIN = {
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
}
_NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Folding:
    """The result of ``fold``, by layer path.

    Attributes:
        folded: the layer that now contains each BatchNorm, by path of the BatchNorm.
        baked: convolutions with derived filters that are now plain weights.
        left: unchanged norm layers, with the reason.
    """

    folded: Mapping[str, str]
    baked: tuple[str, ...]
    left: Mapping[str, str]

    def lines(self, shown: int = 1_000_000) -> list[str]:
        """Return a report of the changes, and of the unchanged layers by reason.

        Args:
            shown: the most layers of a reason that are named.
        """
        lines: list[str] = []
        if self.folded:
            lines.append(f"{len(self.folded)} of the BatchNorm layers folded")
        if self.baked:
            lines.append(
                f"{len(self.baked)} of the convolutions: plain weights instead of"
                " derived ones"
            )
        for reason in dict.fromkeys(self.left.values()):
            paths = [
                shown_path(path) for path, other in self.left.items() if other == reason
            ]
            names = ", ".join(paths[:shown])
            if len(paths) > shown:
                names += ", ..."
            lines.append(f"{len(paths)} not folded ({names}): {reason}")
        return lines or ["nothing to fold: the model has no norm layer"]


def fold(model: nn.Module, example: Tensor) -> tuple[nn.Module, Folding]:
    """Return a copy in eval mode with BatchNorm folded if this is exact, and a report.

    Args:
        model: any model; it does not change.
        example: a batch of inputs; the model and its copy run on it, on a GPU without
            TF32.
    """
    conv = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = conv.fp32_precision
    # TF32 rounds the old and the new filters differently. It would look as if folding
    # changed the outputs.
    conv.fp32_precision = "ieee"
    try:
        return _fold(model, example)
    finally:
        conv.fp32_precision = before


def _fold(model: nn.Module, example: Tensor) -> tuple[nn.Module, Folding]:
    # Find the layer before each norm layer, or the reason why it has none.
    model = copied(model).eval()
    inputs, expected = _inputs_of_norms(model, example)
    pairs, left = dict[str, str](), dict[str, str]()
    for path, norm in model.named_modules():
        if isinstance(norm, _NORMS):
            left[path] = _why_not(norm, inputs[norm])
            if not left[path]:
                pairs[path] = next(iter(inputs[norm]))
    # Fold all together, since this works for most models. If the outputs change, the
    # model also uses some layers elsewhere: folding one after the other shows which.
    folded: dict[str, str] = {}
    if _is_exact(model, pairs, example, expected):
        folded = pairs
    else:
        for path, layer in pairs.items():
            if _is_exact(model, {**folded, path: layer}, example, expected):
                folded[path] = layer
            else:
                left[path] = (
                    "folding it would change the outputs: the model uses its layers, or"
                    " their outputs, elsewhere"
                )
    left = {path: why for path, why in left.items() if path not in folded}
    # Derived filters become plain weights even if nothing is folded, unless the model's
    # own code uses the source of these filters.
    if not folded and not _is_exact(model, {}, example, expected):
        return model, Folding({}, (), left)
    baked = [
        path
        for path, layer in model.named_modules()
        if isinstance(layer, DerivedWeightConv)
    ]
    return folded_at(model, folded), Folding(folded, tuple(baked), left)


@torch.no_grad()
def _inputs_of_norms(
    model: nn.Module, example: Tensor
) -> tuple[Mapping[nn.Module, set[str]], Any]:
    """Return the layers that feed each norm layer, and the model's outputs.

    The layers are paths; "" means any other value.
    """
    # By the id of an output. Keep the tensor, or a later tensor could get its id.
    outputs: dict[int, tuple[str, Tensor]] = {}
    inputs: defaultdict[nn.Module, set[str]] = defaultdict(set)

    def note_input(
        norm: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        value = args[0] if args else kwargs["input"]
        inputs[norm].add(outputs[id(value)][0] if id(value) in outputs else "")

    # Hooks see the steps of the forward pass, but no module name reveals them.
    with ExitStack() as hooks:
        for path, layer in model.named_modules():
            if isinstance(layer, _NORMS):
                hooks.enter_context(
                    layer.register_forward_pre_hook(note_input, with_kwargs=True)
                )
            elif type(layer) in _PLAIN or isinstance(layer, DerivedWeightConv):

                def note_output(
                    layer: nn.Module, args: Any, output: Tensor, path: str = path
                ) -> None:
                    outputs[id(output)] = (path, output)

                hooks.enter_context(layer.register_forward_hook(note_output))
        expected = model(example)
    return inputs, expected


def _why_not(norm: nn.Module, inputs: set[str]) -> str:
    """Return the reason why a norm layer cannot be folded, or "" if it may be."""
    if not isinstance(norm, _BatchNorm):
        return f"{type(norm).__name__} computes its statistics from each example"
    if norm.running_mean is None:
        return "it has no running statistics in use"
    if not inputs:
        return "the forward pass does not call it"
    if len(inputs) > 1 or "" in inputs:
        return "its input is not the output of one convolution or linear layer"
    return ""


@torch.no_grad()
def _is_exact(
    model: nn.Module, pairs: Mapping[str, str], example: Tensor, expected: Any
) -> bool:
    """Return whether the model with these folded pairs has these outputs, rounded."""
    try:
        outputs = folded_at(model, pairs)(example)
    # The model's own code uses attributes that the new layers lack.
    except Exception:
        return False
    for one, other in zip(tree_leaves(outputs), tree_leaves(expected), strict=True):
        if isinstance(other, Tensor) and other.is_floating_point() and other.numel():
            # Infinite numbers may be equal, but their difference is NaN.
            apart = torch.where(one == other, 0.0, (one - other).abs()).max()
            largest = float(other.abs().max())
            if not float(apart) <= 1000 * torch.finfo(other.dtype).eps * largest:
                return False
    return True


def folded_at(model: nn.Module, pairs: Mapping[str, str]) -> nn.Module:
    """Return a copy in eval mode whose BatchNorm layers are folded into these layers.

    Derived filters become weights.

    Args:
        model: any model; it does not change.
        pairs: the path of a layer by the path of the BatchNorm after it, like in
            ``Folding.folded``.
    """
    # Use a holder, since the model itself may be the replaced layer.
    holder = nn.Sequential(copied(model).eval())
    layers = dict(holder[0].named_modules(remove_duplicate=False))
    # The replacement of each layer. A norm layer with an activation inside leaves this.
    new: dict[nn.Module, nn.Module] = {}
    for path, of_layer in pairs.items():
        norm, layer = layers[path], layers[of_layer]
        new[layer] = _fused(layer, norm)
        inside = OrderedDict(norm.named_children())
        new[norm] = nn.Sequential(inside) if inside else nn.Identity()
    for layer in layers.values():
        if isinstance(layer, DerivedWeightConv) and layer not in new:
            new[layer] = _plain(layer)
    # Replace in all places, as a layer may be in a model twice.
    for module in list(holder.modules()):
        for name, child in module._modules.items():
            if child in new:
                module.add_module(name, new[child])
    # A model may reach an old layer in another way than by its path, such as by a list.
    # It would then compute without the folded part.
    for layer in new:
        layer.register_forward_pre_hook(_refuse)
    result: nn.Module = holder[0]
    return result


def _refuse(layer: nn.Module, args: Any) -> None:
    raise RuntimeError("a layer that was folded is called")


def _fused(layer: nn.Module, norm: Any) -> Any:
    """Return a plain layer for both, computed in double precision."""
    # Without affine parameters, gamma is 1 and beta is 0.
    mean, var = norm.running_mean.double(), norm.running_var.double()
    gamma, beta = torch.ones_like(var), torch.zeros_like(var)
    if norm.weight is not None:
        gamma = norm.weight.detach().double()
    if norm.bias is not None:
        beta = norm.bias.detach().double()
    # Get W and b of the layer; the result has a bias in any case.
    plain = _plain(layer)
    bias = None if plain.bias is None else plain.bias.double()
    entries = (plain.weight.double(), bias, mean, var, norm.eps, gamma, beta)
    if isinstance(plain, nn.Linear):
        fused = fuse_linear_bn_weights(*entries)
    else:
        fused = fuse_conv_bn_weights(*entries, isinstance(plain, _ConvTransposeNd))
    plain.weight, plain.bias = (
        nn.Parameter(value.to(plain.weight.dtype), False) for value in fused
    )
    return plain


def _plain(layer: nn.Module) -> Any:
    """Return a copy of a layer in torch's own class, with derived filters as weights."""
    plain = copied(layer).requires_grad_(False)
    if not isinstance(plain, DerivedWeightConv):
        return plain
    # Remove the sources of the weight, such as a gain of each filter.
    weight = nn.Parameter(plain.derived_weight(), False)
    for name in set(plain._parameters) - {"weight", "bias"}:
        delattr(plain, name)
    plain.weight = weight
    # Change its class in place, since a new layer would need all constructor arguments.
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if isinstance(plain, kind):
            plain.__class__ = kind
    return plain

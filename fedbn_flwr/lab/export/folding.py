"""BatchNorm folded into the convolution or linear layer before it. Torch only.

In eval mode BatchNorm is a scale and a shift per channel, y = a * x + b, a = gamma / sqrt(var + eps), b = beta - a *
mean. After a layer x = W u + c both are one layer with the weight a * W and the bias a * c + b. Batch renormalisation
is BatchNorm in eval mode. A subclass that is BatchNorm and then its own modules, as timm's ``BatchNormAct2d`` with
``drop`` and ``act``, leaves these modules in its place. Filters that are derived from a weight (``norm=wsconv``,
``group+ws``) become plain weights.

Which layer is before which is seen in a forward pass, never read from names: a BatchNorm is folded only if each of its
inputs is the output of one layer, and nothing else uses this output, or the parameters and buffers of both. At the end
the outputs of both models are compared.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedbn_flwr.norms.convolution import DerivedWeightConv
from fedbn_flwr.norms.own_forward import has_own_forward
from fedbn_flwr.norms.report import shown_path
from fedbn_flwr.training.copying import copied

__all__ = ["Folding", "fold"]

_PLAIN = {nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear}
_HIDDEN = "the model reaches its layers in other ways than by their paths, so that folding would change its outputs"


@dataclass(frozen=True)
class Folding:
    """What ``fold`` did, by layer path.

    Attributes:
        folded: the layer that each BatchNorm is in now, by path of the BatchNorm.
        baked: convolutions whose derived filters are now plain weights.
        left: norm layers that stay as they are, and why.
    """

    folded: Mapping[str, str]
    baked: tuple[str, ...]
    left: Mapping[str, str]

    def lines(self, shown: int = 1_000_000) -> list[str]:
        """Return a report: what was done, and for each reason the layers that stay, at most ``shown`` by name."""
        lines: list[str] = []
        if self.folded:
            lines.append(f"{len(self.folded)} of the BatchNorm layers folded")
        if self.baked:
            lines.append(f"{len(self.baked)} of the convolutions: plain weights instead of derived ones")
        for reason in dict.fromkeys(self.left.values()):
            paths = [shown_path(path) for path, other in self.left.items() if other == reason]
            names = ", ".join(paths[:shown]) + (", ..." if len(paths) > shown else "")
            lines.append(f"{len(paths)} not folded ({names}): {reason}")
        return lines or ["nothing to fold: the model has no norm layer"]


def fold(model: nn.Module, example: Tensor) -> tuple[nn.Module, Folding]:
    """Return a copy of the model in eval mode with BatchNorm folded where that is exact, and what was done.

    Args:
        model: any model; it does not change.
        example: a batch of inputs; the model runs on it, and the new one, on a GPU without TF32.
    """
    conv = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = conv.fp32_precision
    # TF32 rounds the old and the new filters differently, which would look as if folding changed the outputs.
    conv.fp32_precision = "ieee"
    try:
        return _fold(model, example)
    finally:
        conv.fp32_precision = before


def _fold(original: nn.Module, example: Tensor) -> tuple[nn.Module, Folding]:
    model = copied(original).eval()
    paths = {layer: path for path, layer in reversed(list(model.named_modules(remove_duplicate=False)))}
    norms = {path: layer for path, layer in model.named_modules() if _is_norm(layer)}
    uses, expected = _uses(model, example)
    new: dict[nn.Module, nn.Module] = {}
    folded, left = {}, {}
    for path, norm in norms.items():
        layer, reason = _layer_before(norm, uses, paths)
        if layer is None or not isinstance(norm, _BatchNorm):
            left[path] = reason
        else:
            new |= {layer: _fused(layer, norm), norm: _what_follows(norm)}
            folded[path] = paths[layer]
    derived = [module for module in model.modules() if isinstance(module, DerivedWeightConv)]
    new |= {conv: _plain(conv) for conv in derived if conv not in new}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in new:
                module.add_module(name, new[child])
    result = new.get(model, model)
    if new and (why := _unlike(result, example, expected, new)):
        return copied(original).eval(), Folding({}, (), dict.fromkeys(norms, why))
    return result, Folding(folded, tuple(paths[conv] for conv in derived), left)


@torch.no_grad()
def _unlike(model: nn.Module, example: Tensor, expected: Any, replaced: Iterable[nn.Module]) -> str:
    """Return "" if the model's outputs are these up to rounding, and no replaced layer is called; else why not."""
    called: list[nn.Module] = []
    with ExitStack() as hooks:
        for layer in replaced:
            hooks.enter_context(layer.register_forward_pre_hook(lambda layer, args: called.append(layer)))
        try:
            outputs = model(example)
        except Exception:  # the model's own code uses what the new layers lack
            return _HIDDEN
    if called:
        return _HIDDEN
    for one, other in zip(tree_leaves(outputs), tree_leaves(expected), strict=True):
        if isinstance(other, Tensor) and other.is_floating_point() and other.numel():
            apart = float(torch.where(one == other, 0.0, (one - other).abs()).max())  # infinite ones may be equal
            largest = float(other.abs().max())
            if not apart <= 1000 * torch.finfo(other.dtype).eps * largest:
                return f"folding would change its outputs by up to {apart:.2g}, where the largest is {largest:.2g}"
    return ""


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm))


def _layer_before(norm: nn.Module, uses: _Uses, paths: Mapping[nn.Module, str]) -> tuple[nn.Module | None, str]:
    """Return the layer that a norm layer can be folded into; else None, and why."""
    if not isinstance(norm, _BatchNorm):
        return None, f"{type(norm).__name__} computes its statistics from each example"
    if _unusual(norm) or (_adds_modules(norm) and has_own_forward(norm, training=False, then_children=True)):
        return None, f"{type(norm).__name__} has hooks or a forward of its own"
    if norm.running_mean is None or norm.training:
        return None, "it has no running statistics in use"
    if not uses.before[norm]:
        return None, "the forward pass does not call it"
    (layer, *others) = uses.before[norm]
    if others or layer is None:
        return None, "its input is not the output of one convolution or linear layer"
    if _unusual(layer) or not (type(layer) in _PLAIN or isinstance(layer, DerivedWeightConv)):
        return None, f"{paths[layer]} is no plain layer"
    if isinstance(layer, _ConvTransposeNd) and layer.groups > 1:
        return None, f"{paths[layer]} is a transposed convolution with groups"
    if uses.after[layer] != {norm} or {layer, norm} & uses.shared:
        return None, f"the output or the weight of {paths[layer]} is used elsewhere, too"
    return layer, ""


def _adds_modules(norm: _BatchNorm) -> bool:
    return has_own_forward(norm, training=False)


def _what_follows(norm: _BatchNorm) -> nn.Module:
    """Return what a layer that can be folded does after BatchNorm."""
    return nn.Sequential(OrderedDict(norm.named_children())) if _adds_modules(norm) else nn.Identity()


def _unusual(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks) or is_parametrized(layer)


def _fused(layer: nn.Module, norm: _BatchNorm) -> Any:
    """Return a plain layer for both; computed in double precision."""
    plain = _plain(layer)
    mean, var = (entry.double() for entry in (norm.running_mean, norm.running_var) if entry is not None)
    gamma = torch.ones_like(var) if norm.weight is None else norm.weight.detach().double()
    beta = torch.zeros_like(var) if norm.bias is None else norm.bias.detach().double()
    entries = (
        plain.weight.double(),
        None if plain.bias is None else plain.bias.double(),
        mean,
        var,
        norm.eps,
        gamma,
        beta,
    )
    if isinstance(plain, nn.Linear):
        fused = fuse_linear_bn_weights(*entries)
    else:
        fused = fuse_conv_bn_weights(*entries, isinstance(plain, _ConvTransposeNd))
    plain.weight, plain.bias = (nn.Parameter(value.to(plain.weight.dtype), False) for value in fused)
    return plain


def _plain(layer: nn.Module) -> Any:
    """Return a copy of a layer of torch's own class; filters derived from a weight are its weight."""
    plain = copied(layer).requires_grad_(False)
    if not isinstance(plain, DerivedWeightConv):
        return plain
    weight = nn.Parameter(plain.derived_weight(), False)
    for name in set(plain._parameters) - {"weight", "bias"}:
        delattr(plain, name)
    plain.weight = weight
    kind: Any = next(kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(plain, kind))
    plain.__class__ = kind
    return plain


@dataclass
class _Uses:
    """Who uses what in a forward pass.

    Attributes:
        before: the layers whose outputs each norm layer gets; None for any other value.
        after: the norm layers that use the outputs of each layer; None for any other use.
        shared: layers whose parameters or buffers are used outside of them.
    """

    before: defaultdict[nn.Module, set[nn.Module | None]] = field(default_factory=lambda: defaultdict(set))
    after: defaultdict[nn.Module, set[nn.Module | None]] = field(default_factory=lambda: defaultdict(set))
    shared: set[nn.Module] = field(default_factory=set)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
    """Notes each operation that uses the output, a parameter or a buffer of a watched layer."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses = _Uses()
        self._calls: list[nn.Module | None] = [None]
        self._outputs: dict[int, tuple[nn.Module, Tensor]] = {}  # the tensor is kept, so that its id stays its own
        self._owners: defaultdict[int, set[nn.Module]] = defaultdict(set)
        for layer in layers:
            for entry in (*layer.parameters(), *layer.buffers()):
                self._owners[id(entry)].add(layer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operation, and do it."""
        self.note((args, kwargs))
        return func(*args, **(kwargs or {}))

    def note(self, values: Any) -> None:
        """Note the use of these values by the layer that is being called, if any."""
        caller = self._calls[-1]
        for value in (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)):
            self.uses.shared |= self._owners.get(id(value), set()) - {caller}
            if layer := self._layer_of(value):
                self.uses.after[layer].add(caller)

    def begin(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the start of a layer's call; a pre-hook."""
        self._calls.append(layer)
        if _is_norm(layer):
            self.uses.before[layer].add(self._layer_of(args[0] if args else kwargs["input"]))

    def end(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note the end of a layer's call; a hook."""
        self._calls.pop()
        features_last = isinstance(layer, nn.Linear) and isinstance(output, Tensor) and output.dim() > 2
        if isinstance(output, Tensor) and not _is_norm(layer) and not features_last:
            self._outputs[id(output)] = (layer, output)

    def _layer_of(self, value: Tensor) -> nn.Module | None:
        return self._outputs.get(id(value), (None,))[0]


@torch.no_grad()
def _uses(model: nn.Module, example: Tensor) -> tuple[_Uses, Any]:
    """Return who uses what, and the model's outputs."""
    layers = [module for module in model.modules() if _is_norm(module) or isinstance(module, (_ConvNd, nn.Linear))]
    watched = [layer for layer in layers if not _unusual(layer)]  # outputs of the others count as any other value
    watch = _Watch(watched)
    with ExitStack() as stack:
        for layer in watched:
            stack.enter_context(layer.register_forward_pre_hook(watch.begin, with_kwargs=True))
            stack.enter_context(layer.register_forward_hook(watch.end))
        stack.enter_context(watch)
        outputs = model(example)
        watch.note(outputs)
    return watch.uses, outputs

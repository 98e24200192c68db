"""Find the BatchNorm layers of a model by type and replace them.

A layer is an instance of torch's ``_BatchNorm``: 1d, 2d, 3d, ``SyncBatchNorm`` and user
subclasses, with or without affine parameters and running statistics, at any path of
registered submodules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms.own_forward import has_own_forward
from fedbn_flwr.norms.report import Replacement, named
from fedbn_flwr.training.freezing import refuse_scripted

__all__ = [
    "LayerMaker",
    "Place",
    "batchnorm_places",
    "describe",
    "refuse_uninitialised",
    "swap_batchnorm",
]

LayerMaker = Callable[[_BatchNorm, str], nn.Module]


class Place(NamedTuple):
    """The place of a BatchNorm layer; the parent is None if the model is the layer."""

    path: str
    layer: _BatchNorm
    parent: nn.Module | None
    name: str


def batchnorm_places(model: nn.Module) -> tuple[Place, ...]:
    """Return every place of a BatchNorm layer; a layer at two paths has two places."""
    return tuple(_walk(model, "", None, ""))


def _walk(
    module: nn.Module, path: str, parent: nn.Module | None, name: str
) -> Iterator[Place]:
    if isinstance(module, _BatchNorm):
        yield Place(path, module, parent, name)
        return
    # named_children() and named_modules() would leave out the second name of a shared
    # layer.
    for child_name, child in module._modules.items():
        if child is not None:
            child_path = f"{path}.{child_name}" if path else child_name
            yield from _walk(child, child_path, module, child_name)


def swap_batchnorm(
    model: nn.Module, make: LayerMaker
) -> tuple[nn.Module, tuple[Replacement, ...]]:
    """Replace each BatchNorm layer of ``model`` by ``make(layer, path)``, in place.

    ``make`` is called once per layer object, with its first path; the new layer gets
    the old mode.

    Returns:
        The model (the new layer, if the model itself was a BatchNorm) and one row per
        place.

    Raises:
        NormLayerError: a layer contains layers (a fused activation), has a forward pass
            of its own or forward hooks, which would be lost, or TorchScript holds it.
    """
    refuse_scripted(model, "another norm")
    places = batchnorm_places(model)
    _refuse_more_than_norms(places)
    # One new layer for a layer at several places, which stay shared.
    made = {}
    rows = []
    for path, layer, parent, name in places:
        if id(layer) not in made:
            made[id(layer)] = make(layer, path).train(layer.training)
        new = made[id(layer)]
        if parent is None:
            model = new
        else:
            # In the old one's place, so the order of the children stays.
            parent.add_module(name, new)
        rows.append(Replacement(path, describe(layer), describe(new)))
    return model, tuple(rows)


def refuse_uninitialised(model: nn.Module) -> None:
    """Raise NormLayerError, with their names, for lazy layers without channels yet."""
    lazy = []
    for path, layer, _, _ in batchnorm_places(model):
        if isinstance(layer, LazyModuleMixin) or not layer.num_features:
            lazy.append(named(path, layer))
    if lazy:
        raise NormLayerError(
            f"the number of channels is not known yet for: {', '.join(lazy)}. Run one"
            " batch through the model first, or give BatchNorm its number of channels."
        )


def _refuse_more_than_norms(places: tuple[Place, ...]) -> None:
    """Raise NormLayerError if a layer does more than BatchNorm: it would be lost."""
    lost = []
    for path, layer, _, _ in places:
        # timm's layers hold an Identity where others hold an activation.
        inner = [
            type(child).__name__
            for child in layer.children()
            if not isinstance(child, nn.Identity)
        ]
        if inner:
            lost.append(named(path, layer, f" holds {', '.join(inner)}"))
        elif has_own_forward(layer, training=True):
            lost.append(named(path, layer, " has a forward pass of its own"))
        elif layer._forward_hooks or layer._forward_pre_hooks:
            lost.append(named(path, layer, " has forward hooks"))
    if lost:
        raise NormLayerError(
            "replacing these BatchNorm layers would lose what they do beside"
            f" normalising (an activation, a scale): {', '.join(lost)}. Move it into a"
            " layer after the norm layer, register hooks after the replacement, or use"
            " norm='batch'."
        )


def describe(layer: nn.Module) -> str:
    """Return a layer's type, channels and settings other than a norm's defaults."""
    name = type(layer).__name__
    if isinstance(layer, _ConvNd):
        kernel = "x".join(map(str, layer.kernel_size))
        return f"{name}({layer.in_channels}, {layer.out_channels}, {kernel})"
    if isinstance(layer, nn.Linear):
        return f"{name}({layer.in_features}, {layer.out_features})"
    if isinstance(layer, nn.GroupNorm):
        parts = [f"{layer.num_groups}, {layer.num_channels}"]
    elif isinstance(layer, _BatchNorm):
        parts = [str(layer.num_features)]
    else:
        return f"{name}()"
    if layer.eps != 1e-5:
        parts.append(f"eps={layer.eps:g}")
    if not layer.affine:
        parts.append("affine=False")
    if isinstance(layer, _BatchNorm) and not layer.track_running_stats:
        parts.append("track_running_stats=False")
    return f"{name}({', '.join(parts)})"

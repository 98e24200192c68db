"""Find the BatchNorm layers of a model by type and replace them.

A layer is an instance of torch's ``_BatchNorm``: 1d, 2d, 3d, ``SyncBatchNorm`` and user
subclasses, with or without affine parameters and running statistics, at any path of
registered submodules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms.replaced_layers import Replacement, named
from fedbn_flwr.training.layer_calls import has_own_forward

LayerMaker = Callable[[_BatchNorm, str], nn.Module]


class Place(NamedTuple):
    """The place of a BatchNorm layer, without a parent if the model is the layer."""

    path: str
    layer: _BatchNorm
    parent: nn.Module | None
    name: str


def batchnorm_places(model: nn.Module) -> tuple[Place, ...]:
    """Return every place of a BatchNorm layer. A layer at two paths has two places."""
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
        NormLayerError: a layer has its own forward pass, forward hooks or modules
            inside, so a part would be lost.
    """
    places = batchnorm_places(model)
    _refuse_other_operations(places)
    # Make one new layer for a layer at several places, so that these places still share
    # a layer.
    made: dict[nn.Module, nn.Module] = {}
    rows = []
    for path, layer, parent, name in places:
        if layer not in made:
            made[layer] = make(layer, path).train(layer.training)
        new = made[layer]
        if parent is None:
            model = new
        else:
            # Use the same name, so that the order of the children does not change.
            parent.add_module(name, new)
        rows.append(Replacement(path, describe(layer), describe(new)))
    return model, tuple(rows)


def _refuse_other_operations(places: Iterable[Place]) -> None:
    """Raise NormLayerError for layers that do more than torch's BatchNorm."""
    lost = []
    for path, layer, _, _ in places:
        # ``_modules`` has the parametrizations of gamma and beta as well.
        inside = layer._modules or layer._forward_hooks or layer._forward_pre_hooks
        if inside or has_own_forward(layer):
            lost.append(named(path, layer))
    if lost:
        raise NormLayerError(
            "replacing these BatchNorm layers would remove operations other than"
            f" normalising (an activation, a scale): {', '.join(lost)}. Move them into"
            " a layer after the norm layer, register hooks after the replacement, or"
            " use norm='batch'."
        )


def describe(layer: nn.Module) -> str:
    """Return a layer's type, its channels, and settings that are not defaults."""
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

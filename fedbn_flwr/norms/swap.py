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

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms.replaced_layers import named
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


def swap_batchnorm(model: nn.Module, make: LayerMaker) -> nn.Module:
    """Replace each BatchNorm layer of ``model`` by ``make(layer, path)``, in place.

    ``make`` is called once per layer object, with its first path; the new layer gets
    the old mode.

    Returns:
        The model, or the new layer if the model itself was a BatchNorm.

    Raises:
        NormLayerError: a layer has its own forward pass, forward hooks or modules
            inside, so a part would be lost.
    """
    places = batchnorm_places(model)
    _refuse_other_operations(places)
    # Make one new layer for a layer at several places, so that these places still share
    # a layer.
    made: dict[nn.Module, nn.Module] = {}
    for path, layer, parent, name in places:
        if layer not in made:
            made[layer] = make(layer, path).train(layer.training)
        new = made[layer]
        if parent is None:
            model = new
        else:
            # Use the same name, so that the order of the children does not change.
            parent.add_module(name, new)
    return model


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
            " a layer after the norm layer, register hooks after the replacement, build"
            " the model with another norm (timm: norm_layer=), or use norm='batch'."
        )

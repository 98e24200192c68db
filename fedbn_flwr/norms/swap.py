"""Find the BatchNorm layers of a model by type and replace them.

A layer is an instance of torch's ``_BatchNorm``: 1d, 2d, 3d, ``SyncBatchNorm`` and user
subclasses, with or without affine parameters and running statistics, at any path of
registered submodules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms.own_forward import modules_after
from fedbn_flwr.norms.replaced_layers import Replacement, named

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
    the old mode. Modules that a subclass applies after BatchNorm, such as the
    activation of timm's ``BatchNormAct2d``, follow the new layer under their names.

    Returns:
        The model (the new layer, if the model itself was a BatchNorm) and one row per
        place.

    Raises:
        NormLayerError: a layer has a custom forward pass or forward hooks, so a part
            would be lost.
    """
    places = batchnorm_places(model)
    after = _modules_after(places)
    # Make one new layer for a layer at several places, so that these places still share
    # a layer.
    made: dict[nn.Module, tuple[nn.Module, str]] = {}
    rows = []
    for path, layer, parent, name in places:
        if layer not in made:
            new = make(layer, path).train(layer.training)
            described = describe(new)
            for module in after[layer].values():
                described += f", then {type(module).__name__}"
            made[layer] = _followed(new, after[layer]), described
        new, described = made[layer]
        if parent is None:
            model = new
        else:
            # Use the same name, so that the order of the children does not change.
            parent.add_module(name, new)
        rows.append(Replacement(path, describe(layer), described))
    return model, tuple(rows)


def _followed(new: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return a layer that also applies these modules to its output."""
    if modules and isinstance(new, nn.Identity):
        return nn.Sequential(OrderedDict(modules))
    # Add the modules to the new layer, so that their entries keep the names under which
    # weights are loaded.
    for name, module in modules.items():
        new.add_module(name, module)
    if modules:
        new.register_forward_hook(_apply_modules)
    return new


def _apply_modules(layer: nn.Module, args: Any, output: Any) -> Any:
    for module in layer.children():
        output = module(output)
    return output


def _modules_after(places: tuple[Place, ...]) -> dict[nn.Module, dict[str, nn.Module]]:
    """Return the modules that each layer applies after BatchNorm, by name.

    Raises:
        NormLayerError: a layer does more, and this would be lost.
    """
    found: dict[nn.Module, dict[str, nn.Module]] = {}
    lost = []
    for path, layer, _, _ in places:
        after = modules_after(layer)
        if after is None:
            lost.append(named(path, layer, " has a custom forward pass"))
        elif not after and not all(
            isinstance(m, nn.Identity) for m in layer.children()
        ):
            lost.append(named(path, layer, " contains layers that it does not apply"))
        elif layer._forward_hooks or layer._forward_pre_hooks:
            lost.append(named(path, layer, " has forward hooks"))
        else:
            found[layer] = after
    if lost:
        raise NormLayerError(
            "replacing these BatchNorm layers would remove operations other than"
            f" normalising (an activation, a scale): {', '.join(lost)}. Move them into"
            " a layer after the norm layer, register hooks after the replacement, or"
            " use norm='batch'."
        )
    return found


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

"""Search for the head of a model (the layers that make its outputs).

A forward pass reveals the head. The search follows the pass from the outputs back to
the first layers on every path. Here a layer is a module with a weight of two or more
dimensions; BatchNorm after the classifier, a scale or a temperature are skipped.

The search uses a recorded pass (``recorded_pass``), because it needs no inputs and
takes milliseconds. A model whose code branches on values cannot be recorded. If inputs
are available, a copy of such a model runs a real pass, and the search follows
autograd's graph. Without inputs, the sizes of the linear layers and convolutions may
show the head. If the model multiplies by a matrix outside any layer, the head is
unknown, and the result contains the candidates. Torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.model_state import copied, unwrap
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.recorded_pass import record, skeleton_of

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Names of a layer's weight, including the old weight_norm and spectral_norm.
_WEIGHTS = ("weight", "weight_v", "weight_g", "weight_orig")


class Head(NamedTuple):
    """The layers that make a model's outputs.

    Attributes:
        paths: the paths of the layers, and the names of parameters outside layers. ""
            means that the model itself is the layer.
        known: whether ``paths`` are the head. If not, each path is only a candidate.
    """

    paths: tuple[str, ...]
    known: bool


def head_of(model: nn.Module, inputs: Callable[[], Any] | None = None) -> Head:
    """Return the head of a model.

    Args:
        model: the model; it does not change. The paths do not contain its wrappers.
        inputs: returns the inputs of some examples; None if examples are not available.
    """
    plain = unwrap(model)
    layers = dict(_layers(plain))
    ends: set[str] = set()
    # The user's code may raise any exception, especially on proxies.
    with suppress(Exception):
        ends = _ends_of_record(plain)
    with suppress(Exception):
        if inputs and not ends:
            ends = _ends_of_pass(plain, inputs)
    if not ends:
        shapes: dict[str, tuple[int, ...]] = {}
        # Read the sizes from the layers, because reading a parametrized weight may
        # change it.
        for path, layer in layers.items():
            if isinstance(layer, nn.Linear):
                shapes[f"{path}.weight"] = layer.out_features, layer.in_features
            elif isinstance(layer, _ConvNd):
                shapes[f"{path}.weight"] = layer.out_channels, layer.in_channels, 1
        return head_in_shapes(shapes)
    outside = ends.difference(layers)
    return Head((*filter(ends.__contains__, layers), *sorted(outside)), not outside)


def head_in_shapes(shapes: Mapping[str, Any]) -> Head:
    """Return the head, found by the shapes of a state's entries.

    The head is known if the last layer is the only layer whose outputs do not fit into
    any other layer. After a linear layer, a layer with as many inputs fits. After a
    convolution, a layer with as many inputs or more fits, because its outputs may be
    flattened. The order of the layers does not suffice to find the head.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for name, value in shapes.items():
        shape = tuple(getattr(value, "shape", value) or ())
        if len(shape) > 1:
            path = _layer_path(name)
            # A layer with weight_norm has two arrays: the weight and a scale. Keep the
            # larger shape, because it is the weight's.
            sizes[path] = max(shape, sizes.get(path, ()))
    free = []
    for path, size in sizes.items():
        taking = [
            other[1]
            for at, other in sizes.items()
            if at != path and len(other) <= len(size)
        ]
        flattened = len(size) > 2 and size[0] <= max(taking, default=0)
        if not flattened and size[0] not in taking:
            free.append(path)
    return Head(tuple(free or sizes), free == [*sizes][-1:] != [])


def _layer_path(name: str) -> str:
    path, parametrized, _ = f".{name}".partition(".parametrizations.")
    if parametrized:
        return path.removeprefix(".")
    path, _, leaf = name.rpartition(".")
    return path if leaf in _WEIGHTS else name


def _layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, layer) for each layer with a matrix.

    A shared layer is yielded with each of its paths.
    """
    inner = {name: one for name, one in module._modules.items() if _has_matrix(one)}
    of_torch = type(module).__module__.startswith("torch.nn.")
    # a module of torch, such as attention, may use the weights of modules inside it
    whole = of_torch and not isinstance(module, _CONTAINERS)
    if _has_matrix(module) and (whole or not inner):
        yield path, module
        return
    for name, one in inner.items():
        if one is not None:
            yield from _layers(one, f"{path}.{name}".removeprefix("."))


def _paths_by_layer(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return the paths of each layer with a matrix."""
    paths: dict[nn.Module, list[str]] = {}
    for path, layer in _layers(model):
        paths.setdefault(layer, []).append(path)
    return paths


def _has_matrix(module: nn.Module | None) -> bool:
    parameters = [] if module is None else module.parameters()
    return any(is_lazy(p) or p.dim() > 1 for p in parameters)


def _ends_of_pass(model: nn.Module, inputs: Callable[[], Any]) -> set[str]:
    """Return the layers that make the outputs, found in a real pass of a copy.

    The pass is in eval mode. Each way back from the outputs ends at the first layer, or
    at a parameter outside layers. The result has their paths and names.
    """
    trial = copied(model).eval().requires_grad_(True)
    made: dict[Any, list[str]] = {}

    def note(layer: nn.Module, _: Any, outputs: Any) -> None:
        for node in _nodes(outputs):
            made[node] = paths[layer]

    paths = _paths_by_layer(trial)
    for layer in paths:
        layer.register_forward_hook(note)
    names: dict[Any, list[str]] = {}
    for name, parameter in trial.named_parameters():
        if parameter.dim() > 1:
            names[parameter] = [name]
    with torch.enable_grad(), seeded(0):
        outputs = trial(inputs_for(trial)(inputs()))

    def ends_at(node: Any) -> list[str]:
        # A node of autograd that ends at a parameter has the attribute "variable".
        return made.get(node) or names.get(getattr(node, "variable", None), [])

    return _followed(
        _nodes(outputs), ends_at, lambda node: (one for one, _ in node.next_functions)
    )


def _nodes(outputs: Any) -> list[Any]:
    """Return autograd's nodes of the tensors in a module's outputs."""
    leaves = tree_leaves(outputs)
    return [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]


def _ends_of_record(model: nn.Module) -> set[str]:
    """Return the layers that make the outputs, found in a recorded pass.

    The result is as in ``_ends_of_pass``.
    """
    skeleton = skeleton_of(model)
    paths = _paths_by_layer(skeleton)
    graph, modules = record(skeleton, paths.__contains__)

    def ends_at(node: Any) -> list[str]:
        if node.op == "get_attr":
            return [str(node.target)]
        layer = modules[node.target] if node.op == "call_module" else None
        return [] if layer is None else paths.get(layer, [])

    *_, last = graph.nodes
    return _followed(last.all_input_nodes, ends_at, lambda node: node.all_input_nodes)


def _followed(
    starts: Iterable[Any],
    ends_at: Callable[[Any], list[str]],
    before: Callable[[Any], Iterable[Any]],
) -> set[str]:
    """Return the ends of all ways back from the operations ``starts``.

    A way ends at an operation if ``ends_at`` returns names for it. Otherwise the way
    continues with the operations that ``before`` returns.
    """
    found: set[str] = set()
    left, seen = list(starts), set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ends = ends_at(node)
        found.update(ends)
        if not ends:
            left += before(node)
    return found

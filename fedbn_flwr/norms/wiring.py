"""The BatchNorm layers that get the output of each convolution.

They are found from the forward pass, without an input. Linear layers without a bias are
treated like convolutions. The axes may be moved between such a layer and its norm.

The forward pass runs on proxies, see ``training.recorded_pass``. Each convolution, each
norm layer and each submodule with neither of them counts as one operation.

If the forward of a module cannot run on proxies (it branches on values), each of its
children is traced separately. Links between the children are then taken from their
order of registration: a convolution, followed by a norm layer with as many channels.
The same rule applies to layers that the forward pass does not reach. ``nn.Identity``
between two layers is ignored.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.training.recorded_pass import record, skeleton_of

_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
_MOVES = (
    "flatten",
    "reshape",
    "view",
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "contiguous",
)
# Attributes and methods that do not depend on the values of a tensor.
_QUESTIONS = ("size", "dim", "shape", "ndim", "dtype", "device")


@dataclass
class Wiring:
    """The links between the layers of a model, by ``id`` of the layer objects.

    Attributes:
        norms_after: the norm layers that get the output of a convolution, or of a
            linear layer without a bias; () if anything else uses the output as well.
        added: norm layers whose output is a term of a sum, in at least one of its uses.
    """

    norms_after: dict[int, tuple[_BatchNorm, ...]] = field(default_factory=dict)
    added: set[int] = field(default_factory=set)


def _feeds_norms(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd) or (
        isinstance(module, nn.Linear) and module.bias is None
    )


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) or _feeds_norms(module)


def wiring(model: nn.Module) -> Wiring:
    """Return the links between the layers of ``model``, without changing it."""
    skeleton = skeleton_of(model)
    originals = dict(model.named_modules(remove_duplicate=False))
    original_of = {}
    for path, module in skeleton.named_modules(remove_duplicate=False):
        original_of[id(module)] = originals[path]
    result = Wiring()
    _follow(skeleton, result, original_of)
    # Links from the forward pass have priority over the order of registration.
    for conv, norm in _neighbours(model):
        result.norms_after.setdefault(id(conv), (norm,))
    return result


def _follow(
    module: nn.Module, result: Wiring, original_of: dict[int, nn.Module]
) -> None:
    """Add the links in a module's forward pass to the result.

    If the pass cannot run on proxies, the links in the children's passes are added.
    """
    try:
        graph, layers = record(module, _is_layer)
    except Exception:
        # User code may raise any exception if it gets a proxy.
        for child in module.children():
            if not _is_layer(child) and any(map(_is_layer, child.modules())):
                _follow(child, result, original_of)
        return
    norms_after = result.norms_after
    for node in graph.nodes:
        if node.op != "call_module":
            continue
        layer = original_of[id(layers[str(node.target)])]
        users = list(_users(node, layers, moves=isinstance(layer, nn.Linear)))
        if _feeds_norms(layer):
            after = []
            for user in users:
                if user.op == "call_module":
                    used_by = original_of[id(layers[str(user.target)])]
                    if isinstance(used_by, _BatchNorm):
                        after.append(used_by)
            # If the output of any call is also used elsewhere, norms are not the only
            # layers that follow.
            earlier = norms_after.get(id(layer))
            if len(after) < len(users) or earlier == ():
                norms_after[id(layer)] = ()
            else:
                norms_after[id(layer)] = (*(earlier or ()), *after)
        elif isinstance(layer, _BatchNorm) and any(
            user.target in _ADDITIONS for user in users
        ):
            result.added.add(id(layer))


def _users(
    node: fx.Node, layers: dict[str, nn.Module], *, moves: bool
) -> Iterator[fx.Node]:
    """Yield the operations that use the values of a node's result.

    ``nn.Identity`` does not count as a use; the operations after it are yielded. With
    ``moves``, the same applies to operations that move the axes.
    """
    for user in node.users:
        target = user.target
        called = layers[str(target)] if user.op == "call_module" else None
        moved = moves and getattr(target, "__name__", target) in _MOVES
        if moved or isinstance(called, nn.Identity):
            yield from _users(user, layers, moves=moves)
            continue
        asks = target in _QUESTIONS
        if target is getattr:
            asks = user.args[1] in _QUESTIONS
        if not asks:
            yield user


def _neighbours(model: nn.Module) -> Iterator[tuple[nn.Module, _BatchNorm]]:
    """Yield (layer, norm) for each layer registered right before a norm that fits."""
    for module in model.modules():
        children = [
            child for child in module.children() if not isinstance(child, nn.Identity)
        ]
        for first, second in itertools.pairwise(children):
            if not (_feeds_norms(first) and isinstance(second, _BatchNorm)):
                continue
            if second.num_features == num_outputs(first):
                yield first, second


def num_outputs(layer: nn.Module) -> int:
    """Return the outputs of a linear layer, or the out channels of a convolution."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    return int(layer.out_channels)  # type: ignore[arg-type]

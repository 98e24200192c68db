"""A forward pass that only records its operations.

The pass runs on ``torch.fx`` proxies, without an input. Each layer, and each submodule
without a layer, counts as one operation. Python runs only in the modules around them,
so attention, dropout or stochastic depth cause no problem. ``torch.fx.symbolic_trace``
is not used, because it patches ``nn.Module`` for the whole process while it runs, and
clients train in threads. Torch only.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn


class _Recorder(fx.proxy.GraphAppendingTracer):
    """Records operations with the useful part of their arguments.

    Proxies and plain values are recorded, and a node for each matrix that trains.

    Attributes:
        names: the names of the parameters.
    """

    names: dict[Any, str]

    def create_arg(self, a: Any) -> Any:
        """Return ``a`` with nodes instead of proxies, without other objects."""
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, dict):
            return {str(key): self.create_arg(value) for key, value in a.items()}
        if isinstance(a, tuple | list):
            return tuple(self.create_arg(value) for value in a)
        # The tensor is a parameter that the module uses directly, or it is computed
        # from one.
        if isinstance(a, Tensor) and a.dim() > 1:
            trains = a.requires_grad or isinstance(a, nn.Parameter)
            name = self.names.get(a, "weights outside layers")
            return self.graph.get_attr(name) if trains else None
        return a if isinstance(a, str | int | float) else None


def skeleton_of(model: nn.Module) -> nn.Module:
    """Return layers like those of a model, in eval mode, for ``record``.

    They have the tensors of the model, which a recorded pass does not change. They have
    no forward hooks, because hooks may fail on proxies.
    """
    twins: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        twins[module] = object.__new__(type(module))
    for module, twin in twins.items():
        children = {
            name: child if child is None else twins[child]
            for name, child in module._modules.items()
        }
        vars(twin).update(vars(module), training=False, _modules=children)
        twin._forward_hooks, twin._forward_pre_hooks = OrderedDict(), OrderedDict()
    return twins[model]


@torch.enable_grad()
def record(
    root: nn.Module, is_layer: Callable[[nn.Module], bool]
) -> tuple[fx.Graph, dict[str, nn.Module]]:
    """Return the operations of a forward pass of ``root``, and its layers by name.

    The function replaces the forward passes of the layers and does not restore them, so
    afterwards ``root`` and its children can only be recorded. Exceptions of the model's
    code on proxies are passed on.
    """
    graph = fx.Graph()
    recorder = _Recorder(graph)
    recorder.names = {p: name for name, p in root.named_parameters()}
    layers = {}
    for path, module in root.named_modules():
        if is_layer(module) or not any(map(is_layer, module.modules())):
            layers[path] = module
            # Set an attribute of this object. Do not change its class, because other
            # models in the process use it.
            module.forward = _noting(recorder, path)
    inputs = []
    for k in range(_num_inputs(root)):
        inputs.append(fx.Proxy(graph.placeholder(f"input{k}"), recorder))
    graph.output(recorder.create_arg(root(*inputs)))
    return graph, layers


def _noting(recorder: _Recorder, path: str) -> Any:
    def forward(*args: Any, **kwargs: Any) -> fx.Proxy:
        return recorder.create_proxy("call_module", path, args, kwargs)

    return forward


def _num_inputs(module: nn.Module) -> int:
    """Return the number of required inputs of a forward pass, at least one."""
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    needed = 0
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind in positional:
            needed += parameter.default is inspect.Parameter.empty
    return max(1, needed)

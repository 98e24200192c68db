"""Passes over a model that leave no trace in it, and copies of a model. Torch only."""

from __future__ import annotations

import copy
import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.errors import StateError
from fedbn_flwr.training.freezing import layers_of

__all__ = ["SecondModel", "borrowed", "copied", "hidden_state"]

M = TypeVar("M", bound=nn.Module)
SecondModel = Callable[[], AbstractContextManager[nn.Module]]
"""Lends a second model with the state of a first one."""
_WITHOUT_STATE: tuple[type, ...] = (nn.Module, Tensor, type, Enum, bool, int, float)
_WITHOUT_STATE += (complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
_CONTAINERS = (dict, OrderedDict, list, set, deque)


def _uncompiled() -> AbstractContextManager[Any]:
    """Run compiled modules as plain modules in the block.

    A compiled module ignores hooks that were added after its compilation.
    """
    # Without a compiled model in this process, the import would take seconds.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


@contextmanager
def borrowed(model: M) -> Iterator[M]:
    """Lend a model for passes in the block, uncompiled and without gradients.

    At the end, the model has its tensors, their values and gradients, its modes, hooks
    and attributes again, and the containers in its attributes have their contents. Other
    objects, such as the closure of a hook, keep what the passes change in them.
    """
    tensors = {*model.parameters(), *model.buffers()}
    tensors = {one for one in tensors if not is_lazy(one)}
    containers: dict[int, tuple[Any, Any]] = {}
    waiting: list[Any] = [vars(module) for module in model.modules()]
    for one in waiting:  # grows
        if isinstance(one, Tensor) and one.is_leaf and not is_lazy(one):
            tensors.add(one)
        elif type(one) in _CONTAINERS and id(one) not in containers:
            containers[id(one)] = one, copy.copy(one)
            waiting += one.values() if isinstance(one, dict) else one
    # Keep the memory as well as the values, because a pass may move the model.
    states = [
        (one, one.data, one.detach().clone(), one.grad, one.requires_grad)
        for one in tensors
    ]
    for one in tensors:
        one.grad = None
    try:
        with _uncompiled():
            yield model
    finally:
        for container, before in containers.values():
            if _ids(container) != _ids(before):
                container.clear()
                add = getattr(container, "update", None) or container.extend
                add(before)
        for one, data, values, gradient, trains in states:
            one.requires_grad_(trains)
            one.data = data
            data.copy_(values)
            one.grad = gradient


def is_stateless(value: Any) -> bool:
    """Return whether an object is restored with the model, or has no state."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    if isinstance(value, BuiltinFunctionType | MethodType):
        return isinstance(value.__self__, ModuleType | type | nn.Module | None)
    return value is None or isinstance(value, _WITHOUT_STATE)


def hidden_state(model: nn.Module) -> str:
    """Return the first layer with an object that ``borrowed`` cannot restore, or ""."""
    for path, module in model.named_modules():
        waiting: list[Any] = [*vars(module).values()]
        for one in waiting:  # grows
            if type(one) in _CONTAINERS or isinstance(one, tuple):
                waiting += one.values() if isinstance(one, dict) else one
            elif isinstance(one, functools.partial):
                waiting += [one.func, *one.args, *one.keywords.values()]
            elif not is_stateless(one):
                layer = f"layer '{path}'" if path else "the model"
                return f"{layer} ({type(module).__name__}) has a {type(one).__name__}"
    return ""


def _ids(container: Any) -> list[int]:
    values = container.values() if isinstance(container, dict) else ()
    return [*map(id, container), *map(id, values)]


def copied(model: M) -> M:
    """Return ``copy.deepcopy(model)``.

    Raises:
        StateError: the model cannot be copied.
        NormLayerError: a module is in TorchScript.
    """
    layers_of(model)  # gives the reason for a module in TorchScript
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise StateError(
            f"this model cannot be copied ({type(error).__name__}: {error}). Build a"
            " second one, or let the model itself be changed, where this is possible."
        ) from error

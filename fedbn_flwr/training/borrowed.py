"""Passes over a model that leave no trace in it, and copies of a model. Torch only."""

from __future__ import annotations

import copy
import dis
import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _WrappedHook
from torch.nn.parameter import is_lazy

from fedbn_flwr.errors import StateError
from fedbn_flwr.training.freezing import layers_of

__all__ = ["Lend", "Lent", "borrowed", "copied", "hidden_state", "lending", "rebinds"]

M = TypeVar("M", bound=nn.Module)


class Lent(NamedTuple):
    """A model for passes that leave no trace, and its task.

    Attributes:
        model: the model.
        task: the task of this model, because a user's loss may refer to the model.
    """

    model: nn.Module
    task: Any


Lend = Callable[[], AbstractContextManager[Lent]]
"""Lends a second model with the state and the modes of a first one."""
_PLAIN: tuple[type, ...] = (type, Enum, bool, int, float, complex, str, bytes)
_PLAIN += (torch.dtype, torch.device, torch.memory_format, type(None))
_WITHOUT_STATE = (nn.Module, Tensor, *_PLAIN)
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


def lending(model: nn.Module, task: Any, second: Lend | None = None) -> Lend:
    """Return ``second``, or else a function that lends the model itself."""

    @contextmanager
    def lend() -> Iterator[Lent]:
        with borrowed(model) as lent:
            yield Lent(lent, task)

    return second or lend


@functools.cache
def rebinds(code: CodeType) -> bool:
    """Return whether a function binds a ``nonlocal`` name again."""
    steps = dis.get_instructions(code)
    written = {step.argval for step in steps if step.opname == "STORE_DEREF"}
    return not written.isdisjoint(code.co_freevars)


def is_stateless(value: Any) -> bool:
    """Return whether an object is restored with the model, or has no state."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return not rebinds(value.__code__) and all(isinstance(c, _PLAIN) for c in cells)
    if isinstance(value, BuiltinFunctionType | MethodType):
        return isinstance(value.__self__, ModuleType | type | nn.Module | None)
    return isinstance(value, _WITHOUT_STATE)


def hidden_state(model: nn.Module) -> str:
    """Return the first layer with an object that ``borrowed`` cannot restore, or ""."""
    for path, module in model.named_modules():
        waiting: list[Any] = [*vars(module).values()]
        for one in waiting:  # grows
            if type(one) in _CONTAINERS or isinstance(one, tuple):
                waiting += one.values() if isinstance(one, dict) else one
            elif isinstance(one, functools.partial):
                waiting += [one.func, *one.args, *one.keywords.values()]
            elif isinstance(one, _WrappedHook):  # torch's own, such as of weight_norm
                waiting.append(one.hook)
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

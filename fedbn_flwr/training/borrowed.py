"""Passes over a model that leave no trace in it, and copies of a model. Torch only."""

from __future__ import annotations

import copy
import dis
import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _WrappedHook
from torch.nn.parameter import is_lazy

from fedbn_flwr.errors import StateError
from fedbn_flwr.training.freezing import layers_of

__all__ = [
    "Lend",
    "borrowed",
    "copied",
    "hidden_state",
    "is_plain",
    "key_of",
    "lending",
    "outside_state",
    "reached",
]

M = TypeVar("M", bound=nn.Module)


Lend = Callable[[], AbstractContextManager[tuple[nn.Module, Any]]]
"""Lends a second model, with the state and the modes of a first one, and its task."""
_PLAIN: tuple[type, ...] = (type, Enum, bool, int, float, complex, str, bytes)
_PLAIN += (torch.dtype, torch.device, torch.memory_format, type(None), ModuleType)
_PLAIN += (CodeType,)
_CONTAINERS = (dict, OrderedDict, list, set, deque)


def parts_of(one: Any, containers: tuple[type, ...] = ()) -> list[Any] | None:
    """Return the parts of a function, a partial or a tuple; None for other objects.

    ``containers`` are further types with parts.
    """
    if isinstance(one, functools.partial):
        return [one.func, one.args, *one.keywords.items()]
    if isinstance(one, FunctionType):
        own = [value for name, value in vars(one).items() if name != "__wrapped__"]
        cells = [cell.cell_contents for cell in one.__closure__ or ()]
        defaults = (one.__kwdefaults__ or {}).items()
        code = [one.__code__, one.__module__, one.__defaults__, *defaults]
        return [*code, *cells, *([own] if own else [])]
    if isinstance(one, _WrappedHook):  # torch's own, such as of weight_norm
        return [one.hook]
    if isinstance(one, tuple) or type(one) in containers:
        return [*(one.items() if isinstance(one, dict) else one)]
    return None


def reached(values: Iterable[Any], containers: tuple[type, ...] = ()) -> list[Any]:
    """Return objects, their parts, the parts of these, and so on."""
    found, opened = [*values], set()
    for one in found:  # grows
        parts = parts_of(one, containers)
        if parts and id(one) not in opened:
            opened.add(id(one))
            found += parts
    return found


def is_plain(one: Any, containers: tuple[type, ...] = ()) -> bool:
    """Return whether an object has no state, apart from its parts."""
    if isinstance(one, FunctionType):
        return not _rebinds(one.__code__)
    if isinstance(one, BuiltinFunctionType):
        return isinstance(one.__self__, ModuleType | type | None)
    return isinstance(one, _PLAIN) or parts_of(one, containers) is not None


def key_of(one: Any) -> Hashable:
    """Return a key that functions of the same code and of equal values share.

    Raises:
        TypeError: it has parts that are not plain.
    """
    if not is_plain(one):
        raise TypeError
    parts = parts_of(one)
    return (type(one), one) if parts is None else (type(one), *map(key_of, parts))


@functools.cache
def _rebinds(code: CodeType) -> bool:
    """Return whether a function binds a ``nonlocal`` name again."""
    steps = dis.get_instructions(code)
    written = {step.argval for step in steps if step.opname == "STORE_DEREF"}
    return not written.isdisjoint(code.co_freevars)


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
    and attributes again, and the containers in its attributes and in closures of hooks
    have their contents. Other objects keep what the passes change in them.
    """
    found = reached([*map(vars, model.modules())], _CONTAINERS)
    containers = {
        id(one): (one, copy.copy(one)) for one in found if type(one) in _CONTAINERS
    }
    tensors = {
        one
        for one in (*model.parameters(), *model.buffers(), *found)
        if isinstance(one, Tensor) and one.is_leaf and not is_lazy(one)
    }
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
    def lend() -> Iterator[tuple[nn.Module, Any]]:
        with borrowed(model) as lent:
            yield lent, copy.deepcopy(task)  # a loss may have a state

    return second or lend


def hidden_state(model: nn.Module) -> str:
    """Return the first layer with an object that ``borrowed`` cannot restore, or ""."""
    for path, module in model.named_modules():
        for one in reached([vars(module)], _CONTAINERS):
            one = one.__self__ if isinstance(one, MethodType) else one
            restored = isinstance(one, nn.Module | Tensor)
            if not restored and not is_plain(one, _CONTAINERS):
                return f"{_named(path)} has a {type(one).__name__}"
    return ""


def _named(path: str) -> str:
    return f"layer '{path}' of the model" if path else "the model"


def outside_state(model: nn.Module) -> dict[str, Any]:
    """Return comparable facts of what a pass may change outside the state dict.

    They have the names of the attributes. The last entry keeps the objects alive whose
    ids are facts.
    """
    in_state = {id(one) for one in model.state_dict(keep_vars=True).values()}
    alive: list[Any] = []

    def fact(one: Any) -> Any:
        alive.append(one)
        if parts_of(one, _CONTAINERS) is not None:
            return type(one)
        if id(one) in in_state:
            return one.requires_grad, one.dtype
        if isinstance(one, _PLAIN):
            return one
        return id(one), getattr(one, "_version", 0)

    facts: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name != "training":
                whole = f"attribute '{name}' of {_named(path)}"
                facts[whole] = [*map(fact, reached([value], _CONTAINERS))]
    return {**facts, "": alive}


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

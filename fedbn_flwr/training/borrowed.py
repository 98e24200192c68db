"""Passes over a model that leave no trace in it, and copies of a model. Torch only."""

from __future__ import annotations

import copy
import dis
import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.errors import StateError
from fedbn_flwr.training.freezing import in_mode, layers_of

__all__ = [
    "Lend",
    "borrowed",
    "copied",
    "is_plain",
    "key_of",
    "lending",
    "no_other_state",
    "reached",
]

M = TypeVar("M", bound=nn.Module)


Lend = Callable[[], AbstractContextManager[tuple[nn.Module, Any]]]
"""Lends a second model, with the state and the modes of a first one, and its task."""
_PLAIN: tuple[type, ...] = (type, Enum, bool, int, float, complex, str, bytes)
_PLAIN += (torch.dtype, torch.device, torch.memory_format, type(None), ModuleType)
_PLAIN += (CodeType,)
_CONTAINERS = (dict, OrderedDict, list, set, deque)
_OF_TORCH = "torch.nn.utils."
_CACHE = type(functools.cache(len))
# The compiler and the watch over a loop change their own objects in a pass.
_CLOSED = ("torch._dynamo", "torch._inductor", "fedbn_flwr.")


def parts_of(one: Any) -> list[Any] | None:
    """Return the parts of a function, a partial or a tuple; None for other objects."""
    if isinstance(one, functools.partial):
        return [one.func, one.args, *one.keywords.items()]
    if isinstance(one, FunctionType):
        own = [value for name, value in vars(one).items() if name != "__wrapped__"]
        cells = [cell.cell_contents for cell in one.__closure__ or ()]
        defaults = (one.__kwdefaults__ or {}).items()
        code = [one.__code__, one.__module__, one.__defaults__, *defaults]
        return [*code, *cells, *([own] if own else [])]
    return [*one] if isinstance(one, tuple) else None


def _contents(one: Any) -> list[Any] | None:
    if type(one) in _CONTAINERS:
        return [*(one.items() if isinstance(one, dict) else one)]
    return parts_of(one)


def _state(closed: Collection[int], one: Any) -> list[Any] | None:
    """Return the parts from which ``copy`` and ``pickle`` would make an equal object."""
    parts = _contents(one)
    if isinstance(one, Tensor):
        hooks = (one._backward_hooks, one._post_accumulate_grad_hooks)
        parts = [vars(one), *(dict(one) for one in hooks if one)]
    if parts is not None or id(one) in closed or isinstance(one, _PLAIN):
        return parts
    if type(one).__module__.startswith(_CLOSED):
        return None
    try:
        made = one.__reduce_ex__(4)
    except Exception:  # a lock, a file, or a user's object
        return None
    if isinstance(made, str):  # the name of a global object
        return None
    return [*made[1:3], *(list(items) for items in made[3:5] if items)]


def reached(
    values: Iterable[Any], parts: Callable[[Any], list[Any] | None] = parts_of
) -> list[Any]:
    """Return objects, their parts, the parts of these, and so on."""
    found, opened = [*values], set()
    for one in found:  # grows
        of_one = parts(one)
        if of_one and id(one) not in opened:
            opened.add(id(one))
            found += of_one
    return found


def is_plain(one: Any) -> bool:
    """Return whether an object has no state, apart from its parts."""
    if isinstance(one, FunctionType):
        return not _rebinds(one.__code__)
    if isinstance(one, BuiltinFunctionType):
        return isinstance(one.__self__, ModuleType | type | None)
    return isinstance(one, _PLAIN) or parts_of(one) is not None


def key_of(one: Any) -> Hashable:
    """Return a key of an object without its parts, equal for equal plain values."""
    parts = parts_of(one)
    if not is_plain(one):
        return id(one)
    return (type(one), one) if parts is None else (type(one), len(parts))


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
    found = reached([*map(vars, model.modules())], _contents)
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


@contextmanager
def no_other_state(model: nn.Module, refusal: str) -> Iterator[None]:
    """Check that the block changes nothing in a model but its state dict and its modes.

    A change in an object without a way to copy it, such as a file, and in the globals
    of a module is not seen.

    Raises:
        StateError: something has changed; the text is ``refusal`` with its name.
    """
    before = _outside_state(model)
    yield
    after = _outside_state(model)
    for name in {**before, **after}:
        # The objects only keep their ids.
        if before.get(name, ())[:1] != after.get(name, ())[:1]:
            raise StateError(refusal.format(name))


def _outside_state(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return comparable facts and the objects behind them, by name of an attribute."""
    state = {id(one): one for one in model.state_dict(keep_vars=True).values()}
    parts = functools.partial(_state, state.keys() | set(map(id, model.modules())))

    def fact(one: Any) -> Any:
        if id(one) in state:
            return getattr(one, "requires_grad", None), getattr(one, "dtype", None)
        if isinstance(one, Tensor) and one.layout is torch.strided:
            values = one.detach().cpu().contiguous().flatten().view(torch.uint8)
            return one.requires_grad, one.shape, values.numpy().tobytes()
        if isinstance(one, _CACHE):
            return id(one), one.cache_info().currsize
        if isinstance(one, _PLAIN) or parts(one) is not None:
            return type(one), one if isinstance(one, _PLAIN) else None
        return object() if hasattr(one, "__next__") else id(one)

    facts = {}
    # First let layers act that empty a cache in train mode.
    with in_mode(model, True):
        for path, module in model.named_modules():
            # Before each pass, hooks of torch compute tensors of the layer.
            hooks = module._forward_pre_hooks.values()
            computes = any(
                type(hook).__module__.startswith(_OF_TORCH) for hook in hooks
            )
            of = f"layer '{path}' of the model" if path else "the model"
            for name, value in vars(module).items():
                if name != "training" and not (computes and isinstance(value, Tensor)):
                    found = reached([value], parts)
                    facts[f"attribute '{name}' of {of}"] = [*map(fact, found)], found
    return facts


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

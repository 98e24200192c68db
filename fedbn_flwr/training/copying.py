"""A second model: built again, or an exact copy of a plain model.

Objects of Python refer to each other in more ways than a copy can follow. Therefore
only a plain object is copied: layers of classes that can be imported, tensors, numbers,
texts, functions that can be imported, and containers of these. A model of any other
kind is built again by the function that built it.
"""

from __future__ import annotations

import dis
import functools
import io
import pickle
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from enum import Enum
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _WrappedHook
from torch.nn.utils import parametrize
from torch.utils.weak import WeakIdKeyDictionary

from fedbn_flwr.errors import StateError
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import load_state

__all__ = [
    "NotPlainError",
    "Observer",
    "Template",
    "copied",
    "may_refer_to",
    "note_build",
    "own_code_refers_to",
    "why_not_plain",
]

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

_VALUES: tuple[type, ...] = (NoneType, bool, float, complex, str, bytes)
_VALUES += (torch.dtype, torch.device, torch.memory_format)
_ADDRESSES = 2**32  # a larger number may be the id of an object
_CONTAINERS = (dict, OrderedDict, list, set, tuple, frozenset, torch.Size)
_BY_NAME = (type, FunctionType, BuiltinFunctionType)
# A class with one of these names may have its own way to be copied.
_WAYS = {"__deepcopy__", "__copy__", "__reduce_ex__", "__reduce__", "__getstate__"}
_WAYS |= {"__setstate__", "__slots__", "__getnewargs__", "__getnewargs_ex__"}
# Code with one of these names may keep the address of an object.
_ADDRESSED = _WAYS | {"id", "hash", "data_ptr", "untyped_storage", "__repr__"}

# The functions that build models again, by model. This is module state, because the
# callers of ``copied`` have only the model.
_BUILDS: Any = WeakIdKeyDictionary()


class NotPlainError(Exception):
    """An object is not plain; the text names the first part that is not."""


class Observer:
    """A class whose methods may be hooks of a model and of its copies."""


class _Parts:
    """The parts of an object that a copy has anew, and those that all copies share.

    Args:
        original: the object.
        only_imported: whether functions must be importable.

    Raises:
        NotPlainError: a copy may differ from the original.
    """

    def __init__(self, original: Any, only_imported: bool = False) -> None:
        self.own: dict[int, list[Any]] = {}  # each with its number of references
        self.shared: dict[int, Any] = {}
        self._is_shared = _is_fixed if only_imported else _has_no_state
        self._visit(original)

    def _visit(self, value: Any) -> None:
        kind: Any = type(value)
        if kind in (NoneType, bool) or (kind is int and abs(value) < _ADDRESSES):
            return
        if id(value) in self.own:
            self.own[id(value)][1] += 1
            return
        if self._is_shared(value):
            self.shared[id(value)] = value  # because code may compare it by identity
            return
        self.own[id(value)] = [value, 1]
        contents: Iterable[Any] = ()
        if kind is Tensor or kind is nn.Parameter:
            _refuse_tensor(value)
        elif kind in (dict, OrderedDict):
            keys = [key for key in value if type(key) is not str]
            contents = (*keys, *value.values())
        elif kind in _CONTAINERS:
            contents = value
            if kind is set and [*{*value}] != [*value]:
                raise NotPlainError("a set whose order a copy would change")
        elif isinstance(value, nn.Module):
            if _is_parametrized(value):  # torch makes a class for the layer
                kind = kind.__bases__[0]
            if _own_ways(kind):
                raise NotPlainError(f"a class with {_own_ways(kind)}")
            contents = vars(value).values()
        elif kind is _WrappedHook and not value.with_module:
            contents = (value.hook,)  # torch's own, of parametrizations
        elif kind is functools.partial and not vars(value):
            contents = (value.func, value.args, value.keywords)
        elif isinstance(value, _BY_NAME):
            raise NotPlainError(f"a {kind.__qualname__} that may have state")
        else:
            raise NotPlainError(f"a {kind.__qualname__}")
        for one in contents:
            self._visit(one)


class Template(Generic[T]):
    """A plain object, frozen for any number of exact copies.

    Args:
        original: the object. The template has its own tensors.
        outside: the number of references to the object that only its maker has, for an
            object that was made for this template. Then nothing else may refer to its
            parts. None allows other references.
        is_new: whether nobody used the object before. Then nothing else may refer to
            its layers and containers.

    Attributes:
        is_used: whether the object has come again.

    Raises:
        NotPlainError: a copy may differ from the original.
    """

    def __init__(
        self, original: T, outside: int | None = None, *, is_new: bool = False
    ) -> None:
        parts = _Parts(original, only_imported=outside is not None)
        _refuse_shared_memory(parts)
        if outside is not None or is_new:
            _refuse_links(parts, outside)
        writer = _Writer(parts.shared)
        writer.dump(original)
        self.is_used = False
        self._kept, self._pickled = writer.kept, writer.stream.getvalue()
        self._kept = self._new()

    def _new(self) -> list[Any]:
        return [_cloned(one) if isinstance(one, Tensor) else one for one in self._kept]

    def copy(self) -> T:
        """Return a new copy."""
        reader = _Reader(io.BytesIO(self._pickled))
        reader.kept = self._new()
        return cast(T, reader.load())


class _Writer(pickle.Pickler):
    """Pickles an object, except for the tensors in it and what all copies share."""

    def __init__(self, shared: Container[int]) -> None:
        self.stream, self.kept = io.BytesIO(), list[Any]()
        super().__init__(self.stream, protocol=5)
        self._shared, self._numbers = shared, dict[int, int]()

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, (Tensor, *_BY_NAME)) and id(obj) not in self._shared:
            return None
        # A tensor that is used twice is one tensor in the copy.
        number = self._numbers.setdefault(id(obj), len(self.kept))
        if number == len(self.kept):
            self.kept.append(obj)
        return number

    def reducer_override(self, obj: Any) -> Any:
        if not _is_parametrized(obj):
            return NotImplemented
        # torch refuses to pickle such a layer.
        return object.__new__, (type(obj),), vars(obj), None, None, _set_attributes


class _Reader(pickle.Unpickler):
    kept: list[Any]

    def persistent_load(self, number: int) -> Any:
        return self.kept[number]


def _is_parametrized(value: Any) -> bool:
    return isinstance(value, nn.Module) and parametrize.is_parametrized(value)


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    vars(module).update(attributes)


def _cloned(value: Tensor) -> Tensor:
    new = value.detach().clone()
    if type(value) is nn.Parameter:
        return nn.Parameter(new, value.requires_grad)
    return new.requires_grad_(value.requires_grad)


def _refuse_tensor(value: Tensor) -> None:
    if (
        value.layout is not torch.strided
        or value.is_quantized
        or value.grad_fn
        or not all(name.startswith("_dynamo") for name in vars(value))
        or value._backward_hooks
        or not all(map(_observes, (value._post_accumulate_grad_hooks or {}).values()))
        or value.untyped_storage().nbytes() != value.nbytes
    ):
        raise NotPlainError("a tensor with a graph, a hook, an attribute or a view")


def _refuse_shared_memory(parts: _Parts) -> None:
    used = {0}
    for value, _ in parts.own.values():
        if isinstance(value, Tensor):
            address = value.untyped_storage().data_ptr()
            if address in used and value.numel():
                raise NotPlainError("tensors that share their memory")
            used.add(address)


def _refuse_links(parts: _Parts, outside: int | None) -> None:
    """Raise NotPlainError if others refer to a part.

    Without ``outside``, others may refer to the object and to its tensors.
    """
    (root, inside), *others = parts.own.values()
    # After a use of torch.compile, torch has a weak reference to each new module.
    of_torch = weakref.getweakrefcount(nn.Identity())
    if weakref.getweakrefcount(root) > of_torch or (outside or 0) >= inside:
        raise NotPlainError("something that refers to it")
    # The first object and the first tensor have only the references of this loop.
    usual: dict[bool, int] = {}
    for value, inner in [[nn.Identity(), 0], [torch.empty(1), 0], *others]:
        is_tensor = isinstance(value, Tensor)
        count = weakref.getweakrefcount(value)
        if outside is not None or not is_tensor:
            count += sys.getrefcount(value) - inner
        if outside is not None and is_tensor:
            storage = value.untyped_storage()
            count += torch._C._storage_Use_Count(storage._cdata)
        # Equal immutable objects may be one object.
        is_fixed = isinstance(value, tuple | frozenset | functools.partial)
        if count > usual.setdefault(is_tensor, count) and not is_fixed:
            raise NotPlainError(
                f"a {type(value).__qualname__} to which something else refers"
            )


@functools.lru_cache(maxsize=4096)
def _own_ways(kind: type) -> str:
    """Return a name in the code of a layer's class that forbids copies, or ""."""
    if not _can_be_imported(kind):
        return "no name to import it by"
    for base in kind.__mro__[:-1]:
        if base.__module__.startswith("torch.nn."):
            continue
        found = _WAYS.intersection(vars(base))
        for function in _functions_used(vars(base).values()):
            found |= _ADDRESSED.intersection(_names(function.__code__))
        if found:
            return min(found)
    return ""


def _functions_used(values: Iterable[Any]) -> Iterator[FunctionType]:
    """Yield functions, and those that their code names, except for torch's."""
    waiting, seen = [*values], set[FunctionType]()
    for one in waiting:  # grows
        for inner in ("__func__", "__wrapped__", "fget", "func"):
            one = getattr(one, inner, one)
        if not isinstance(one, FunctionType) or one in seen:
            continue
        seen.add(one)
        if one.__module__.partition(".")[0] not in ("torch", "fedbn_flwr"):
            yield one
            waiting += _globals_of(one)


def _globals_of(function: FunctionType) -> list[Any]:
    return [function.__globals__.get(name) for name in _names(function.__code__)]


def _globals_used(values: Iterable[Any]) -> Iterator[Any]:
    for function in _functions_used(values):
        yield from _globals_of(function)


def _names(code: CodeType) -> set[str]:
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def _is_fixed(value: Any) -> bool:
    """Return whether all copies may share a value, because it has no state."""
    kind: Any = type(value)
    if kind in (tuple, frozenset, torch.Size):
        return all(map(_is_fixed, value))
    if isinstance(value, BuiltinFunctionType):  # not a method of an object
        return isinstance(value.__self__, ModuleType | type | NoneType)
    if isinstance(value, Enum):
        return _can_be_imported(kind)
    if _observes(value):
        return True
    is_number = kind is int and abs(value) < _ADDRESSES
    return (
        is_number
        or kind in _VALUES
        or (isinstance(value, _BY_NAME) and _can_be_imported(value))
    )


def _observes(hook: Any) -> bool:
    # A function that is excluded from compilation is wrapped.
    if isinstance(hook, FunctionType):
        hook = getattr(hook, "__wrapped__", hook)
    return isinstance(hook, MethodType) and isinstance(hook.__self__, Observer)


def _has_no_state(value: Any) -> bool:
    """Return whether a value is fixed, or is a function without state."""
    if _is_fixed(value) or not isinstance(value, FunctionType):
        return _is_fixed(value)
    if vars(value) or _assigns(value.__code__):
        return False
    inner = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    inner += [cell.cell_contents for cell in value.__closure__ or ()]
    return all(map(_is_fixed, inner))


def _assigns(code: CodeType) -> bool:
    """Return whether code assigns a variable of a function around it."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return any(map(_assigns, inner)) or any(
        one.opname == "STORE_DEREF" and one.argval in code.co_freevars
        for one in dis.get_instructions(code)
    )


def _can_be_imported(value: Any) -> bool:
    found: Any = sys.modules.get(value.__module__ or "")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def own_code_refers_to(model: nn.Module) -> bool:
    """Return whether the code of a model's classes may find the model by a name.

    The name is a global or an attribute of a class. Its value is a layer of the model,
    or a container with a layer.
    """
    parts = {*map(id, model.modules())}
    kinds = {base for layer in model.modules() for base in type(layer).__mro__[:-1]}
    own = [kind for kind in kinds if not kind.__module__.startswith("torch.")]
    named = [value for kind in own for value in vars(kind).values()]
    for value in (*named, *_globals_used(named)):
        if isinstance(value, dict):
            value = [*value, *value.values()]
        inner = value if isinstance(value, _CONTAINERS) else [value]
        if not parts.isdisjoint(map(id, inner)):
            return True
    return False


def may_refer_to(function: Any, model: nn.Module) -> bool:
    """Return whether a loss or a loop may use a layer of a model, or have state."""
    try:
        parts = _Parts(function)
    except NotPlainError:
        return True
    if any(id(layer) in parts.own for layer in model.modules()):
        return True
    given = [function, *vars(type(function)).values()]
    return any(
        isinstance(one, nn.Module | nn.Parameter) for one in _globals_used(given)
    )


def why_not_plain(model: nn.Module) -> str:
    """Return the innermost layer that is not plain, with the reason, or ""."""
    # Children come before their parents.
    for path, module in reversed([("", model), *model.named_modules()][1:]):
        try:
            Template(module)
        except NotPlainError as error:
            layer = f"layer '{path}'" if path else "the model"
            return f"{layer} ({type(module).__name__}) has {error}"
    return ""


def note_build(model: nn.Module, build: Callable[[], nn.Module]) -> None:
    """Note the function that builds a model again, for ``copied``."""
    _BUILDS[model] = build


def copied(model: M) -> M:
    """Return a second model with the same state.

    It is built by the function of ``note_build``, or is a copy of a plain model.

    Args:
        model: the model; it does not change.

    Raises:
        StateError: the model has no such function, and is not plain; the message names
            the layer.
        NormLayerError: a module is in TorchScript.
    """
    build = _BUILDS.get(model)
    if build is None:
        try:
            return Template(model).copy()
        except NotPlainError:
            layers_of(model)  # gives another reason for a module in TorchScript
            raise StateError(
                "a second model is needed, but a copy of this model may differ from it:"
                f" {why_not_plain(model)}. Pass the function that builds the model."
            ) from None
    second = cast(M, build())
    state = model.state_dict()
    devices = {entry.device for entry in state.values()}
    if len(devices) == 1:  # the model may have been moved after it was built
        second.to(*devices)
    load_state(second, state)
    for own, other in zip(model.modules(), second.modules(), strict=True):
        # A layer may have got other methods after it was built, such as a frozen mode.
        for name, method in vars(own).items():
            if not isinstance(method, functools.partial) or name in vars(other):
                continue
            # Compare by identity, because == compares an array element by element.
            if next(iter(method.args), None) is own:
                again = functools.partial(method.func, other, *method.args[1:])
                setattr(other, name, again)
        other.training = own.training
    for mine, its in zip(model.parameters(), second.parameters(), strict=True):
        its.requires_grad_(mine.requires_grad)
    note_build(second, build)
    return second

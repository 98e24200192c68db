"""Copies that have nothing in common with the original, whatever it contains.

``copy.deepcopy`` does not copy functions, so two copies of a model would share the
values in a function's closure, such as the counter of a forward hook. A ``Template``
pickles the object once instead, and each copy is made from the pickle. Only classes,
modules of Python and functions with a name that can be imported are shared: their state
belongs to the process.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedbn_flwr.errors import StateError

__all__ = ["Template", "copied", "template_of"]

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

_SHARED = (type, ModuleType, CodeType, BuiltinFunctionType, weakref.ref)


class Template(Generic[T]):
    """An object, frozen for any number of copies.

    Tensors are cloned from the original when a copy is made, so do not change the
    original as long as the template is in use.

    Args:
        original: the object; it does not change.

    Raises:
        Exception: the object contains something that cannot be copied, such as a lock.
    """

    def __init__(self, original: T) -> None:
        stream = io.BytesIO()
        writer = _Writer(stream, protocol=5)
        self.kept: list[_Reference] = []
        writer.kept = self.kept
        writer.dump(original)
        self.pickled = stream.getvalue()

        # Find the plain tensors whose storage no other tensor uses.
        found = [one for one in self.kept if isinstance(one.value, Tensor)]
        tensors = {id(one.value): one.value for one in found}
        for tensor in tensors.values():
            usual = type(tensor) in (Tensor, nn.Parameter)
            if not usual or tensor.layout is not torch.strided:
                return
        used = Counter(one.untyped_storage().data_ptr() for one in tensors.values())
        for one in found:
            value = one.value
            plain = type(value) is Tensor and not value.requires_grad
            if plain and value.is_contiguous():
                storage = value.untyped_storage()
                alone = used[storage.data_ptr()] == 1
                one.owns_storage = alone and storage.nbytes() == value.nbytes

    def copy(self) -> T:
        """Return a new copy."""
        reader = _Reader(io.BytesIO(self.pickled))
        # ``deepcopy`` uses the objects in its memo instead of copies.
        reader.kept, reader.copies = self.kept, {}
        copied: T = reader.load()
        return copied


def copied(model: M) -> M:
    """Return a copy of a model.

    The old ``weight_norm`` and models that keep an activation contain tensors with a
    graph. The copy has the values of these tensors; the next forward pass creates them
    again.

    Args:
        model: the model; it does not change.

    Raises:
        StateError: a layer contains another object that cannot be copied; the message
            names the layer.
    """
    with _naming_the_layer(model):
        return Template(model).copy()


def template_of(model: M) -> Template[M]:
    """Return the template of a model. It raises the errors of ``copied``."""
    with _naming_the_layer(model):
        template = Template(model)
        template.copy()
    return template


@contextmanager
def _naming_the_layer(model: nn.Module) -> Iterator[None]:
    try:
        yield
    # Any exception is possible: the layer may contain a lock, a file or a user's
    # object.
    except Exception as error:
        path, kind = _innermost_that_fails(model)
        raise StateError(
            f"the model cannot be copied: layer '{path or 'the model itself'}' ({kind})"
            f" raised {type(error).__name__}: {error}. Remove the object that cannot be"
            " copied from the layer. Replace an old weight_norm or spectral_norm by the"
            " function in torch.nn.utils.parametrizations."
        ) from error


def _innermost_that_fails(model: nn.Module) -> tuple[str, str]:
    """Return path and class of an innermost layer that cannot be copied."""
    # Children come before their parents, so the first failure is an innermost layer.
    for path, module in reversed(list(model.named_modules())):
        try:
            Template(module)
        except Exception:
            return path, type(module).__name__
    return "", type(model).__name__


@dataclass(eq=False)
class _Reference:
    """An object that the pickle only refers to.

    Attributes:
        value: the object.
        is_shared: whether copies get the object itself, not a deep copy of it.
        owns_storage: whether the object is a plain tensor, such as a buffer, whose
            storage no other tensor uses. ``clone`` is then faster than ``deepcopy``.
    """

    value: Any
    is_shared: bool
    owns_storage: bool = False


class _Writer(pickle.Pickler):
    """Pickles an object, with references to its tensors and to shared objects."""

    kept: list[_Reference]

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, _Reference):
            kept = obj
        elif isinstance(obj, _SHARED):
            kept = _Reference(obj, True)
        elif hasattr(type(obj), "__deepcopy__") and not _is_parametrized(obj):
            kept = _Reference(obj, False)  # tensors and arrays, for example
        else:
            return None
        self.kept.append(kept)
        return len(self.kept) - 1

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and not _can_be_imported(obj):
            names = _Reference(obj.__globals__, True)
            made = obj.__code__, names, obj.__name__, None, obj.__closure__
            state = obj.__defaults__, obj.__kwdefaults__, vars(obj)
            return FunctionType, made, state, None, None, _finish
        if isinstance(obj, CellType):
            return CellType, (), _contents(obj), None, None, _fill
        if isinstance(obj, MethodType):
            return MethodType, (obj.__func__, obj.__self__)
        if _is_parametrized(obj):  # refuses to be pickled
            return object.__new__, (type(obj),), vars(obj), None, None, _set_attributes
        return NotImplemented


class _Reader(pickle.Unpickler):
    """Makes one copy of each object that the pickle refers to and does not share."""

    kept: list[_Reference]
    copies: dict[int, Any]

    def persistent_load(self, number: int) -> Any:
        kept = self.kept[number]
        value = kept.value
        if kept.is_shared:
            return value
        if isinstance(value, Tensor) and (not value.is_leaf or kept.owns_storage):
            return self.copies.setdefault(id(value), value.detach().clone())
        made = copy.deepcopy(value, self.copies)
        # torch leaves out the attributes that code has set on a parameter.
        if isinstance(value, nn.Parameter) and vars(value):
            vars(made).update(copy.deepcopy(vars(value), self.copies))
        return made


def _can_be_imported(function: FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _is_parametrized(obj: Any) -> bool:
    return isinstance(obj, nn.Module) and parametrize.is_parametrized(obj)


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # the function around it has not assigned the variable
        return []


# The pickle calls these functions with new objects, whose parts may contain them.


def _fill(cell: CellType, contents: list[Any]) -> None:
    for content in contents:
        cell.cell_contents = content


def _finish(function: FunctionType, state: tuple[Any, Any, dict[str, Any]]) -> None:
    function.__defaults__, function.__kwdefaults__, attributes = state
    vars(function).update(attributes)


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    vars(module).update(attributes)

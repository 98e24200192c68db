"""The attributes of a model that are not in its state: finds and undoes changes.

A layer may keep values in plain attributes, in lists or in objects of its own: moving
averages, flags, counters, caches. They are not in the state dict, so no message
contains them, but one model serves all clients of a process. ``Attributes`` takes them
down, and ``restore`` puts them back, so that no client sees the values of another client.
"""

from __future__ import annotations

import copy
import operator
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["Attribute", "Attributes", "in_eval_mode", "restored_modes", "unchanged"]

# A module's tables of its parts. ``Layout`` compares their entries.
_PARTS = ("_parameters", "_buffers", "_modules")
# These values cannot change.
_FIXED = (bool, int, float, complex, str, bytes, type(None), type)
_OF_TORCH = "torch.nn.modules."
_MADE_IN_PYTHON = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE


class Attribute(NamedTuple):
    """An attribute of a layer: the path of the layer, and the attribute's name."""

    path: str
    name: str


class _Kind(NamedTuple):
    """How to copy the contents of an object, and to put the copy back into it."""

    of: type
    copy: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]
    same: Callable[[Any, Any], Any] = operator.eq


def _put_table(table: dict[Any, Any], before: dict[Any, Any]) -> None:
    table.clear()
    table.update(before)


def _put_tensor(tensor: Tensor, before: Tensor) -> None:
    # Observers of quantisation change the shape in their first pass.
    if tensor.shape != before.shape:
        tensor.data = before.clone()
    else:
        tensor.copy_(before)


def _same_tensors(now: Tensor, before: Tensor) -> bool:
    same = torch.equal(now, before)
    return same or torch.allclose(now, before, 0, 0, equal_nan=True)


def _same_arrays(now: Any, before: Any) -> bool:
    # Compare the bytes, because NaN differs from NaN.
    return bytes(now.tobytes()) == bytes(before.tobytes())


def _put_generator(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


_ALL = slice(None)
_CONTAINERS = (
    _Kind(dict, dict, _put_table),
    _Kind(list, list, lambda values, before: operator.setitem(values, _ALL, before)),
    _Kind(set, set, _put_table),
    _Kind(deque, deque, lambda values, before: (values.clear(), values.extend(before))),
)
_LEAVES = (
    _Kind(Tensor, lambda one: one.detach().clone(), _put_tensor, _same_tensors),
    _Kind(np.ndarray, np.copy, np.copyto, _same_arrays),
    _Kind(random.Random, random.Random.getstate, random.Random.setstate),
    _Kind(np.random.Generator, lambda g: g.bit_generator.state, _put_generator),
    _Kind(
        torch.Generator,
        torch.Generator.get_state,
        torch.Generator.set_state,
        torch.equal,
    ),
    # TorchScript keeps the attributes of a module in C++, also its mode.
    _Kind(
        torch.jit.ScriptModule,
        operator.attrgetter("training"),
        lambda module, mode: setattr(module, "training", mode),
    ),
)
# Buffers outside the state dict, in a table that has others as well.
_SOME_BUFFERS = _Kind(dict, dict, dict.update, lambda t, b: b.items() <= t.items())


class _Held(NamedTuple):
    """An object with its contents, and the attribute that holds it."""

    value: Any
    before: Any
    at: Attribute
    kind: _Kind

    def has_changed(self) -> bool:
        # The contents of a container are compared by identity first.
        try:
            now = self.value
            if self.kind in _LEAVES:
                now = self.kind.copy(now)
            return not self.kind.same(now, self.before)
        except Exception:  # tensors and arrays have no truth value
            return True


class Attributes:
    """The attributes of all modules of a model, with everything inside them.

    Dicts, lists, sets, queues, tensors, arrays, random generators and objects made in
    Python stay the same objects and get their contents back, at any depth. Objects of
    other kinds, such as locks and open files, are left as they are. Not included are
    global variables, the variables of closures, and attributes that are assigned to a
    class.

    Args:
        model: the model; it does not change.
        with_state: whether parameters and buffers are included. Otherwise only the
            buffers outside the state dict are.
        of_passes: whether only attributes are included that a forward pass may change.
            These are the attributes of layers that torch does not define.
    """

    def __init__(
        self, model: nn.Module, *, with_state: bool = False, of_passes: bool = False
    ) -> None:
        self._containers: list[_Held] = []
        self._leaves: list[_Held] = []
        # All objects that were seen. They are kept, so that no id is used again.
        self._seen: dict[int, Any] = {}
        # The memory of the state, which an attribute may share (a transposed weight).
        self._memory: set[int | None] = {None}
        # An extra state is in the state dict, but its values are attributes.
        self._extra: list[nn.Module] = []
        named = dict(model.named_modules())
        for path, module in named.items():
            self._seen[id(module)] = module
            outside = module._non_persistent_buffers_set
            some = {}
            for name, entry in [*module._parameters.items(), *module._buffers.items()]:
                if name in outside:
                    some[name] = entry
                if with_state or name in outside:
                    self._look(entry, Attribute(path, name))
                elif isinstance(entry, Tensor):
                    self._memory.add(_memory(entry))
                self._seen[id(entry)] = entry
            if some:
                at = Attribute(path, min(some))
                self._leaves.append(_Held(module._buffers, some, at, _SOME_BUFFERS))
            own = type(module).get_extra_state is not nn.Module.get_extra_state
            if own and not (with_state or of_passes):
                self._extra.append(module)
        for path, module in named.items():
            if isinstance(module, torch.jit.ScriptModule):
                del self._seen[id(module)]
                self._look(module, Attribute(path, "training"))
            elif "_orig_mod" in module._modules:
                continue  # a wrapper of the compiler
            elif not (of_passes and type(module).__module__.startswith(_OF_TORCH)):
                held = vars(module)
                if not with_state:
                    self._seen |= {id(held[part]): held[part] for part in _PARTS}
                self._look(held, Attribute(path, ""))
                for kind in type(module).__mro__:
                    if kind is nn.Module:
                        break
                    for name, value in vars(kind).items():
                        if not name.startswith("__"):
                            self._look(value, Attribute(path, name))
        # All containers, and all copies, to compare them in one operation.
        self._now = [held.value for held in self._containers]
        self._before = [held.before for held in self._containers]

    def _look(self, value: Any, at: Attribute) -> None:
        """Take down a value and everything inside it."""
        left = [(value, at)]
        while left:
            value, at = left.pop()
            if type(value) in _FIXED or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, Tensor) and _memory(value) in self._memory:
                continue
            for kind in _CONTAINERS + _LEAVES:
                if isinstance(value, kind.of):
                    held = _Held(value, kind.copy(value), at, kind)
                    (self._leaves if kind in _LEAVES else self._containers).append(held)
                    break
            if isinstance(value, dict):
                left += [(inner, _inside(at, key)) for key, inner in value.items()]
            elif isinstance(value, list | tuple | deque):
                left += [(inner, at) for inner in value]
            elif _is_plain(value):
                left.append((vars(value), at))

    def _same_containers(self) -> bool:
        # This runs for each message. Python compares by identity first.
        try:
            return self._now == self._before
        except Exception:  # tensors and arrays have no truth value
            return False

    def changed(self) -> list[Attribute]:
        """Return the attributes that have changed, each once."""
        if not self._leaves and self._same_containers():
            return []
        found = [held.at for held in self._leaves if held.has_changed()]
        for held in () if self._same_containers() else self._containers:
            if not held.has_changed():
                continue
            if held.at.name:
                found.append(held.at)
                continue
            # the attributes of a module
            for key in {**held.before, **held.value}:
                now, before = held.value.get(key, found), held.before.get(key, found)
                if now is not before and not (type(now) in _FIXED and now == before):
                    found.append(_inside(held.at, key))
        return list(dict.fromkeys(found))

    def restore(self) -> None:
        """Put all contents back, each into the object that held it."""
        extra = [copy.deepcopy(module.get_extra_state()) for module in self._extra]
        with torch.no_grad():
            containers = [] if self._same_containers() else self._containers
            for held in containers + self._leaves:
                # Torch counts each write as a change, so write only if values differ.
                if held.has_changed():
                    held.kind.put(held.value, held.before)
        for module, state in zip(self._extra, extra, strict=True):
            module.set_extra_state(state)


def _memory(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory, or None for a lazy or sparse tensor."""
    if is_lazy(tensor) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage().data_ptr()


def _inside(at: Attribute, key: Any) -> Attribute:
    """Return the attribute of a value in a dict, which may be a module's own dict."""
    return at if at.name else Attribute(at.path, str(key))


def _is_plain(value: Any) -> bool:
    """Return whether an object holds nothing but its ``__dict__``."""
    kind: Any = type(value)
    # A class that reduces in its own way is shared, such as a logger or an enum.
    ways = kind.__reduce__, kind.__reduce_ex__
    if ways != (object.__reduce__, object.__reduce_ex__):
        return False
    return hasattr(value, "__dict__") and all(
        one.__flags__ & _MADE_IN_PYTHON for one in kind.__mro__[:-1]
    )


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the model at the end of the block, after forward passes changed it.

    The block may change modes, parameters, buffers and attributes (``Attributes``).
    Afterwards each is the same object with the same values.
    """
    before = Attributes(model, with_state=True)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Restore every module's train or eval mode at the end of the block."""
    modules = list(model.modules())
    # A layer that overrides ``train`` may change its weights with the mode (LoRA).
    if any(type(module).train is not nn.Module.train for module in modules):
        with unchanged(model):
            yield
        return
    # Restore the modes one by one, because ``model.train(mode)`` would give all modules
    # the same mode.
    modes = [module.training for module in modules]
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, and restore its modes and attributes at the end."""
    attributes = Attributes(model, of_passes=True)
    try:
        with restored_modes(model):
            model.eval()
            yield
    finally:
        attributes.restore()

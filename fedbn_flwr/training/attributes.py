"""Everything that a model holds besides its state, to notice changes and undo them.

A layer may keep values in plain attributes, in lists or in objects of its own: moving
averages, flags, counters, caches. They are not in the state dict, so no message
contains them, but one model serves all clients of a process. ``Attributes`` takes them
down, and ``restore`` puts them back, so that no client sees the values of another one.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["Attribute", "Attributes", "in_eval_mode", "restored_modes", "unchanged"]

# These values cannot change. All others are looked at.
_FIXED = (type(None), bool, int, float, complex, str, bytes, type)
# A module's tables of its parts. ``Layout`` compares their entries.
_PARTS = ("_parameters", "_buffers", "_modules")
_MADE_IN_PYTHON = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE


class Attribute(NamedTuple):
    """An attribute of a layer: the path of the layer, and the attribute's name."""

    path: str
    name: str


class _Held(NamedTuple):
    """A value, its copy, and the attribute that holds it."""

    value: Any
    copy: Any
    at: Attribute


class Attributes:
    """The attributes of all modules of a model, with everything inside them.

    Values are restored by what they are. Dicts, lists, sets, tensors and objects made
    in Python stay the same objects and get their contents back, at any depth. A value
    of another kind, such as an array or a generator, is replaced if its pickle has
    changed. A value without a pickle, such as a lock or an open file, is left as it is.

    Not included are global variables, the variables of closures, and attributes that
    are assigned to a class.

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
        self._dicts: list[_Held] = []
        self._lists: list[_Held] = []
        self._sets: list[_Held] = []
        self._tensors: list[_Held] = []
        self._pickled: list[_Held] = []
        self._scripted: list[_Held] = []
        # Tables of buffers, and the buffers in them that are outside the state dict.
        self._buffers: list[_Held] = []
        # All objects that were seen. They are kept, so that no id is used again.
        self._seen: dict[int, Any] = {}
        # The memory of the state, which an attribute may share (a transposed weight).
        self._of_state: set[int | None] = {None}
        named = dict(model.named_modules())
        # An extra state is in the state dict, but its values are attributes.
        self._extra: list[nn.Module] = []
        if not (with_state or of_passes):
            for module in named.values():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    self._extra.append(module)
        for path, module in named.items():
            self._seen[id(module)] = module
            outside = {}
            for table in (module._parameters, module._buffers):
                for name, entry in table.items():
                    kept = name in module._non_persistent_buffers_set
                    if kept or with_state:
                        self._look(entry, Attribute(path, name))
                    if kept:
                        outside[name] = entry
                    elif isinstance(entry, Tensor):
                        self._of_state.add(_memory(entry))
                    self._seen[id(entry)] = entry
            if outside:
                at = Attribute(path, "")
                self._buffers.append(_Held(module._buffers, outside, at))
        for path, module in named.items():
            # TorchScript keeps the attributes of a module in C++, also its mode.
            if isinstance(module, torch.jit.ScriptModule):
                at = Attribute(path, "training")
                self._scripted.append(_Held(module, module.training, at))
                continue
            if of_passes and type(module).__module__.startswith("torch.nn.modules."):
                continue
            if "_orig_mod" in module._modules:  # a wrapper that holds the compiler
                continue
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
        # The containers and their copies alone, to compare them all at once.
        both = self._dicts + self._lists
        self._now, self._then = [one.value for one in both], [one.copy for one in both]

    def _look(self, value: Any, at: Attribute) -> None:
        """Take down a value and everything inside it."""
        left = [(value, at)]
        while left:
            value, at = left.pop()
            if isinstance(value, _FIXED) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, Tensor):
                if _memory(value) not in self._of_state:
                    self._tensors.append(_Held(value, value.detach().clone(), at))
            elif isinstance(value, dict):
                self._dicts.append(_Held(value, dict(value), at))
                for key, inner in value.items():
                    left.append((inner, _inside(at, key)))
            elif isinstance(value, list):
                self._lists.append(_Held(value, list(value), at))
                left += [(inner, at) for inner in value]
            elif isinstance(value, tuple):
                left += [(inner, at) for inner in value]
            elif isinstance(value, set):
                self._sets.append(_Held(value, set(value), at))
            elif _is_plain(value):
                left.append((vars(value), at))
            elif not callable(value):
                self._pickled.append(_Held(value, _pickle(value), at))

    def _same(self) -> bool:
        """Return whether all dicts and lists have their contents."""
        # This runs for each message. Python compares by identity first.
        try:
            return self._now == self._then
        except Exception:  # tensors and arrays have no truth value
            return False

    def changed(self) -> list[Attribute]:
        """Return the attributes that have changed, each once."""
        found: list[Attribute] = []
        if not self._same():
            for table, before, at in self._dicts:
                for key in {**before, **table}:
                    if _differ(table.get(key, found), before.get(key, found)):
                        found.append(_inside(at, key))
            for values, before, at in self._lists:
                pairs = zip(values, before, strict=False)
                if len(values) != len(before) or any(_differ(*two) for two in pairs):
                    found.append(at)
        for table, outside, at in self._buffers:
            for name, buffer in outside.items():
                if table.get(name) is not buffer:
                    found.append(_inside(at, name))
        found += [at for group, before, at in self._sets if group != before]
        found += [at for t, before, at in self._tensors if not _equal(t, before)]
        found += [at for one, before, at in self._pickled if _pickle(one) != before]
        return list(dict.fromkeys(found))

    def restore(self) -> None:
        """Put all values back, each into the object that held it."""
        extra = [copy.deepcopy(module.get_extra_state()) for module in self._extra]
        fresh: dict[int, Any] = {}
        for place, (value, pickled, at) in enumerate(self._pickled):
            if _pickle(value) == pickled:
                continue
            new = pickle.loads(pickled)
            if isinstance(value, np.ndarray) and value.shape == new.shape:
                value[...] = new
            else:
                fresh[id(value)] = new
                self._pickled[place] = _Held(new, _pickle(new), at)
        if fresh or not self._same():
            for table, before, _ in self._dicts:
                for key, value in before.items():
                    before[key] = _renewed(value, fresh)
                table.clear()
                table.update(before)
            for values, before, _ in self._lists:
                before[:] = [_renewed(value, fresh) for value in before]
                values[:] = before
        for group, before, _ in self._sets:
            group.clear()
            group.update(before)
        for table, outside, _ in self._buffers:
            table.update(outside)
        for module, mode, _ in self._scripted:
            module.training = mode
        with torch.no_grad():
            for tensor, before, _ in self._tensors:
                # Observers of quantisation change the shape in their first pass.
                if tensor.shape != before.shape:
                    tensor.data = before.clone()
                # Torch counts each write as a change, so write only if values differ.
                elif not torch.equal(tensor, before):
                    tensor.copy_(before)
        for module, state in zip(self._extra, extra, strict=True):
            module.set_extra_state(state)


def _renewed(value: Any, fresh: Mapping[int, Any]) -> Any:
    """Return the value, or its copy in ``fresh``, also inside a tuple."""
    if fresh and type(value) is tuple:
        return tuple([_renewed(one, fresh) for one in value])
    return fresh.get(id(value), value)


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
    if kind.__reduce_ex__ is not object.__reduce_ex__:
        return False  # such as a member of an enum
    if kind.__reduce__ is not object.__reduce__:
        return False  # such as a logger, which is pickled by its name
    return hasattr(value, "__dict__") and all(
        one.__flags__ & _MADE_IN_PYTHON and not vars(one).get("__slots__")
        for one in kind.__mro__[:-1]
    )


def _pickle(value: Any) -> bytes | None:
    """Return the pickle of a value, or None if it has none."""
    try:
        return pickle.dumps(value)
    except Exception:  # the value's own code may raise anything
        return None


def _differ(value: Any, before: Any) -> bool:
    if value is before:
        return False
    return not (isinstance(before, _FIXED) and value == before)


def _equal(tensor: Tensor, before: Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN."""
    if torch.equal(tensor, before):
        return True
    if tensor.shape != before.shape or not before.is_floating_point():
        return False
    return torch.equal(tensor.nan_to_num(), before.nan_to_num())


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

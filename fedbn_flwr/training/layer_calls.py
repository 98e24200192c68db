"""Facts about the calls of a single layer.

A layer may have replaced methods, an own forward pass, or checkpoints. Torch only.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_ABSENT = object()


class _Plain:
    """The state of a module without what the package adds to it for a time.

    A copy, a pickle and a TorchScript of the module are made of this state.

    Attributes:
        values: the values of replaced attributes without the package, by name; and the
            ids of the package's hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # Python looks for the first name in the object, torch.jit.script for the second.
        own = {"__getstate__": self.state}
        own["__prepare_scriptable__"] = functools.partial(copy.copy, module)
        self.values: dict[Any, Any] = dict.fromkeys(own, _ABSENT)
        vars(module).update(own)

    def state(self) -> Any:
        """Return the state that the class of the module gives it, without traces."""
        state = type(self.module).__getstate__(self.module)  # type: ignore[no-untyped-call]
        # torch.jit.script replaces the children of what it gets.
        state = {**state, **self.values, "_modules": {**self.module._modules}}
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = state[name].items()
            state[name] = OrderedDict(one for one in hooks if one[0] not in self.values)
        return {name: one for name, one in state.items() if one is not _ABSENT}


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """Keep replaced attributes and hooks of the block out of copies and files."""
    found = [_Plain(module) for module in model.modules()]
    try:
        yield
    finally:
        for plain in found:
            for name in plain.values:
                vars(plain.module).pop(name, None)


def plain_values(module: nn.Module) -> dict[Any, Any]:
    """Return ``_Plain.values`` of a module, or {}."""
    plain = getattr(vars(module).get("__getstate__"), "__self__", None)
    return plain.values if isinstance(plain, _Plain) else {}


def replace_attribute(
    module: nn.Module, name: str, value: object
) -> Callable[[], None]:
    """Replace an attribute or a method of this module by ``value``.

    Other modules of the class do not change. A second model gets a method as well if
    it is a ``functools.partial`` with the module as first argument (``copy_modes``).

    Returns:
        The function that undoes the change. It restores the method of the class or an
        earlier replacement.
    """
    values, before = plain_values(module), vars(module).get(name, _ABSENT)
    is_first = name not in values
    values.setdefault(name, before)
    setattr(module, name, value)

    def undo() -> None:
        # Delete the attribute of the object, so that the method of the class is used
        # again.
        delattr(module, name)
        restored = values.pop(name) if is_first else before
        if restored is not _ABSENT:
            setattr(module, name, restored)

    return undo


def add_hook(
    module: nn.Module, hook: Callable[..., Any], after: bool = False
) -> Callable[[], None]:
    """Call ``hook`` before or after each forward pass; return what undoes this."""
    add = module.register_forward_hook if after else module.register_forward_pre_hook
    handle = add(hook)
    plain_values(module)[handle.id] = _ABSENT
    return handle.remove


def has_own_forward(layer: _BatchNorm) -> bool:
    """Return whether a layer computes something else than torch's BatchNorm.

    Such a subclass may scale, mask or split its input, or apply an activation. So it
    normalises something else than its input, and a replacement would lose a part of it.
    """
    # A method or a compiler may have replaced the forward pass of this object.
    if "forward" in vars(layer):
        return True
    kind = type(layer)
    of_torch = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return kind.forward not in of_torch or kind.__call__ is not nn.Module.__call__


def in_checkpoint() -> bool:
    """Return whether the current call comes from ``torch.utils.checkpoint``.

    A checkpointed part of a model runs a second time, in the backward pass. A method
    counts its measurements of such a part only once, in the first pass.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False

"""Where the entries and parameters of a model are: found once, and read without a walk
over its modules. Torch only.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Layout"]

# the dict of a module, and the name in it
_Place = tuple[MutableMapping[str, Tensor | None], str]


class Layout:
    """The facts of a model's architecture that each of its trainings needs.

    Attributes:
        model: the module, without wrappers such as ``torch.compile``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._parameters = list(model.parameters())
        self._modules = list(model.modules())
        self._structure = _structure(model)
        self._usual_modes = all(
            type(module).train is nn.Module.train for module in self._modules
        )

    @property
    def is_current(self) -> bool:
        """Whether the model still has the modules, parameters and buffers that were
        found; their values may differ.
        """
        return _structure(self.model) == self._structure

    @cached_property
    def _places(self) -> dict[str, _Place] | None:
        return _places(self.model)

    @property
    def state(self) -> dict[str, Tensor]:
        """The entries of ``model.state_dict()``. They share memory with the model,
        until a layer replaces a buffer.
        """
        if self._places is None:
            return dict(self.model.state_dict())
        state = {}
        for name, (held, leaf) in self._places.items():
            state[name] = held[leaf].detach()  # type: ignore[union-attr]
        return state

    def parameters(self) -> list[nn.Parameter]:
        """Return each parameter once, as ``model.parameters()`` does."""
        return self._parameters

    def in_train_mode(self) -> bool:
        """Return whether ``model.train()`` would change nothing."""
        return self._usual_modes and all(map(attrgetter("training"), self._modules))

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers, as ``model.buffers()`` does."""
        return self.model.buffers()


def _structure(model: nn.Module) -> list[tuple[Any, ...]]:
    """Return the modules, their parameters (by identity) and the names of their
    buffers, in one pass.
    """
    found: list[tuple[Any, ...]] = []
    left = [model]
    while left:
        module = left.pop()
        if isinstance(module, torch.jit.ScriptModule):  # it cannot change
            found.append((module,))
            continue
        buffers = module._buffers
        # Parameters by identity, as a layer may replace one; buffers by name and type,
        # as BatchNorm's may become None or a tensor.
        parameters = map(id, module._parameters.values())
        found.append((module, *parameters, *buffers, *map(type, buffers.values())))
        left += [child for child in module._modules.values() if child is not None]
    return found


def _places(model: nn.Module) -> dict[str, _Place] | None:
    """Return the place of each entry of the state dict; None if a module makes entries
    in a way of its own.
    """
    places: dict[str, _Place] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not _is_usual(module):
            return None
        prefix = f"{path}." if path else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places[prefix + leaf] = (module._parameters, leaf)
        for leaf, buffer in module._buffers.items():
            in_state = leaf not in module._non_persistent_buffers_set
            if in_state and buffer is not None:
                places[prefix + leaf] = (module._buffers, leaf)
    # A module may have put another tensor into its state than it has: ask torch once.
    state = model.state_dict(keep_vars=True)
    if list(state) != list(places):
        return None
    for name, (held, leaf) in places.items():
        if held[leaf] is not state[name]:
            return None
    return places


def _is_usual(module: nn.Module) -> bool:
    """Return whether a module's part of the state dict is what its dicts of parameters
    and buffers hold.
    """
    kind = type(module)
    return (
        not isinstance(module, torch.jit.ScriptModule)
        and kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
        and not module._state_dict_hooks
        and not module._state_dict_pre_hooks
    )

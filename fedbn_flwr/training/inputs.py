"""A batch's inputs: one tensor, or several in lists, tuples and dicts, as the model's
``forward`` takes them; and how they get to the model's device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Entries", "device_of", "inputs_for", "map_inputs"]


class Entries(Protocol):
    """A model, or its ``Layout``."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters."""

    def buffers(self) -> Iterable[Tensor]:
        """Return the buffers."""


def inputs_for(model: Entries) -> Callable[[Any], Any]:
    """Return the function that brings a batch's inputs to the model's device, dtype and
    memory format.

    Inputs in several parts keep their structure.
    """
    device, dtype = device_of(model), _dtype_of(model)
    # ``set_memory_format`` has put the model into one of the two formats. A tensor may
    # be in both at once, and then says nothing: one channel, or 1x1 kernels.
    memory_format = torch.contiguous_format
    for p in model.parameters():
        in_channels_last = p.dim() == 4 and p.is_contiguous(
            memory_format=torch.channels_last
        )
        if in_channels_last and not p.is_contiguous():
            memory_format = torch.channels_last
            break

    def prepared(inputs: Any) -> Any:
        if not isinstance(inputs, Tensor):  # such as a packed sequence
            return inputs.to(device)
        wanted = dtype if inputs.is_floating_point() else None
        # A copy from a GPU to the CPU that does not block may be read before it has
        # ended.
        inputs = inputs.to(device, wanted, non_blocking=device.type != "cpu")
        if inputs.dim() != 4:
            return inputs
        return inputs.contiguous(memory_format=memory_format)

    return functools.partial(map_inputs, prepared)


def map_inputs(function: Callable[[Any], Any], inputs: Any) -> Any:
    """Return the same structure with ``function`` of each tensor, and of what else has
    a method ``to``.

    Texts and numbers stay as they are. A mapping of a class of its own becomes a dict.
    """
    if isinstance(inputs, Tensor) or hasattr(inputs, "to"):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: map_inputs(function, part) for name, part in inputs.items()}
    if not isinstance(inputs, (list, tuple)):
        return inputs
    parts = [map_inputs(function, part) for part in inputs]
    if hasattr(inputs, "_fields"):  # a named tuple takes its parts one by one
        return type(inputs)(*parts)
    return type(inputs)(parts)


def device_of(model: Entries) -> torch.device:
    """Return the device of the model's first parameter, else buffer; BatchNorm alone
    may have no parameter.
    """
    first = next(_entries(model), None)
    return torch.get_default_device() if first is None else first.device


def _dtype_of(model: Entries) -> torch.dtype:
    """Return the dtype of the model's first real entry, else that of its first complex
    one, else the default.
    """
    first_complex = None
    for entry in _entries(model):
        if entry.is_floating_point():
            return entry.dtype
        # a complex table that is not trained says nothing of the inputs
        if entry.is_complex() and entry.requires_grad and first_complex is None:
            first_complex = entry.dtype
    return first_complex or torch.get_default_dtype()


def _entries(model: Entries) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()

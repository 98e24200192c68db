"""A batch's inputs: one tensor, or several in lists, tuples and dicts, as the model's
``forward`` takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["map_inputs", "tensors_in"]


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
    return type(inputs)(*parts) if hasattr(inputs, "_fields") else type(inputs)(parts)


def tensors_in(inputs: Any) -> list[Tensor]:
    """Return the tensors of the structure, in its order."""
    found: list[Tensor] = []

    def note(part: Any) -> Any:
        found.extend([part] if isinstance(part, Tensor) else [])
        return part

    map_inputs(note, inputs)
    return found

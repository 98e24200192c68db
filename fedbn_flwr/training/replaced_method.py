"""A method of one module in the place of its class's, until it is undone. Torch only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["replace_method"]


def replace_method(
    module: nn.Module, name: str, function: Callable[..., Any]
) -> Callable[[], None]:
    """Let ``function`` be the method ``name`` of this module alone; return the function
    that undoes it.

    The undo restores what was there before: the class's method, or an earlier
    replacement.
    """
    before = vars(module).get(name)
    setattr(module, name, function)

    def undo() -> None:
        # the instance attribute; the class's method is used again
        delattr(module, name)
        if before is not None:
            setattr(module, name, before)

    return undo

"""Replacing a method of a single module, until it is undone. Torch only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def replace_method(
    module: nn.Module, name: str, function: Callable[..., Any]
) -> Callable[[], None]:
    """Replace the method ``name`` of this module by ``function``.

    Other modules of the class do not change.

    Returns:
        The function that undoes the change. It restores the method of the class or an
        earlier replacement.
    """
    before = vars(module).get(name)
    setattr(module, name, function)

    def undo() -> None:
        # Delete the attribute of the object, so that the method of the class is used
        # again.
        delattr(module, name)
        if before is not None:
            setattr(module, name, before)

    return undo

"""Acting on gradients right before an optimizer's step, also where a closure computes them inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["before_steps"]


def before_steps(optimizer: torch.optim.Optimizer, act: Callable[[], float]) -> RemovableHandle:
    """Call ``act`` before every step of ``optimizer`` (a hook of torch's), once the gradients are there.

    Args:
        optimizer: any; with a closure, as PyTorch Lightning has it, ``act`` follows every call of the closure.
        act: changes gradients; returns what that adds to the loss, since a line search compares values.

    Returns:
        The hook's handle.
    """

    def before(
        _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            act()
            return None

        def compute_and_act() -> Any:
            loss = closure()
            penalty = act()
            return loss if loss is None else loss + penalty

        return args[:1], {**kwargs, "closure": compute_and_act}

    return optimizer.register_step_pre_hook(before)

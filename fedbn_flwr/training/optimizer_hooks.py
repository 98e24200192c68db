"""Change gradients right before an optimizer's step, also if a closure computes them inside the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["before_steps"]


def before_steps(optimizer: torch.optim.Optimizer, act: Callable[[], float]) -> RemovableHandle:
    """Call ``act`` before every step of ``optimizer``, after the gradients are computed; uses a torch hook.

    Args:
        optimizer: any. With a closure, as in PyTorch Lightning, ``act`` runs after every call of the closure.
        act: changes the gradients. It returns what this adds to the loss, because a line search compares losses.

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

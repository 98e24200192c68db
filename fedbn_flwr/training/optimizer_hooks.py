"""Change gradients right before an optimizer's step, also if a closure computes them inside the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fedbn_flwr.errors import ConfigError

__all__ = ["before_steps"]


def before_steps(optimizer: torch.optim.Optimizer, act: Callable[[], float | Tensor]) -> RemovableHandle:
    """Call ``act`` before every step of ``optimizer``, after the gradients are computed; uses a torch hook.

    Args:
        optimizer: any. With a closure, as in PyTorch Lightning, ``act`` runs after every call of the closure.
        act: changes the gradients. It returns what this adds to the loss, because a line search compares losses.

    Returns:
        The hook's handle. ``act`` is not called for a step that a fused optimizer skips as a scaled gradient is not
        finite.

    Raises:
        ConfigError: in a step, if a fused optimizer is given gradients that a gradient scaler has not unscaled.
    """

    def before(
        stepping: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # torch.amp.GradScaler leaves unscaling and skipping to fused optimizers, and tells them by these attributes.
        if getattr(stepping, "grad_scale", None) is not None:
            raise ConfigError(
                f"{type(stepping).__name__} is fused and its gradients are still scaled, so the method's term would "
                "have another scale: call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        if bool(getattr(stepping, "found_inf", False)):
            return None
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

"""Change gradients right before an optimizer's step, also if a closure computes them
inside the step.

Some optimizers, as Opacus' and those of sharpness-aware minimisation, prepare a step
that another one takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fedbn_flwr.errors import ConfigError

__all__ = ["before_steps", "parameters_of", "stepping_optimizers"]


def stepping_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that take the steps of ``optimizer``: those that it holds,
    at any depth, or itself.

    Raises:
        ConfigError: it has no step hooks, as its class does not begin as
            ``torch.optim.Optimizer`` does.
    """
    # No two libraries call the inner one alike: it is found among the attributes.
    values: list[Any] = []
    for value in getattr(optimizer, "__dict__", {}).values():
        values += value if isinstance(value, (list, tuple)) else [value]
    found: list[torch.optim.Optimizer] = []
    for inner in values:
        if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
            found += [one for one in stepping_optimizers(inner) if one not in found]
    # It may call itself an optimizer, and never call torch's ``__init__``.
    if not found and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ConfigError(
            f"{type(optimizer).__name__} has none of the step hooks of"
            " torch.optim.Optimizer: give a torch optimizer, and in a class of your"
            " own call super().__init__(params, defaults)"
        )
    return found or [optimizer]


def parameters_of(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """Return the parameters of all groups."""
    return {
        parameter for group in optimizer.param_groups for parameter in group["params"]
    }


def before_steps(
    optimizer: torch.optim.Optimizer,
    act: Callable[[torch.optim.Optimizer], float | Tensor],
) -> RemovableHandle:
    """Call ``act`` before every step of ``optimizer``, after the gradients are
    computed; uses a torch hook.

    Args:
        optimizer: one that takes its steps itself. With a closure, as in PyTorch
            Lightning, ``act`` runs after every call of the closure.
        act: changes the gradients before a step of the optimizer that it gets. It
            returns what this adds to the loss, because a line search compares losses.

    Returns:
        The hook's handle. ``act`` is not called for a step that a fused optimizer skips
        as a scaled gradient is not finite.

    Raises:
        ConfigError: in a step, if a fused optimizer is given gradients that a gradient
            scaler has not unscaled.
    """

    def before(
        stepping: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # torch.amp.GradScaler leaves unscaling and skipping to fused optimizers, and
        # tells them by these attributes.
        if getattr(stepping, "grad_scale", None) is not None:
            raise ConfigError(
                f"{type(stepping).__name__} is fused and its gradients are still"
                " scaled, so the method's term would have another scale: call"
                " scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        if bool(getattr(stepping, "found_inf", False)):
            return None
        closure = kwargs.get("closure")
        if closure is None and len(args) > 1:
            closure = args[1]
        if closure is None:
            act(stepping)
            return None

        # Inside the step the closure computes the gradients anew, perhaps several times.
        def compute_and_act() -> Any:
            loss = closure()
            penalty = act(stepping)
            return None if loss is None else loss + penalty

        return args[:1], {**kwargs, "closure": compute_and_act}

    return optimizer.register_step_pre_hook(before)

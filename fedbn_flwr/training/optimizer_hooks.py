"""Hooks that change gradients right before an optimizer's step.

They work even if a closure computes the gradients inside the step. Some optimizers
contain an inner optimizer that takes the steps, such as the optimizers of Opacus and of
sharpness-aware minimisation. Then the hooks belong to the inner optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.problems import Known


def stepping_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that take the steps of ``optimizer``.

    They are the optimizers inside it, at any depth. If there are none, it is
    ``optimizer`` itself.

    Raises:
        ConfigError: the optimizer has no step hooks, because its class does not call
            the constructor of ``torch.optim.Optimizer``.
    """
    # Search all attributes, because each library has its own name for the inner
    # optimizer.
    values: list[Any] = []
    for value in getattr(optimizer, "__dict__", {}).values():
        values += value if isinstance(value, (list, tuple)) else [value]
    found: list[torch.optim.Optimizer] = []
    for inner in values:
        if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
            found += [one for one in stepping_optimizers(inner) if one not in found]
    # The step hooks are missing if a subclass never calls torch's ``__init__``.
    return found or [optimizer]


def parameters_of(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """Return the parameters in all groups of an optimizer."""
    return {
        parameter for group in optimizer.param_groups for parameter in group["params"]
    }


def dense_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter, after making a sparse gradient dense.

    An embedding may have a sparse gradient. Torch cannot add a dense tensor to it.
    """
    gradient = parameter.grad
    if gradient is not None and gradient.layout is not torch.strided:
        gradient = parameter.grad = gradient.to_dense()
    return gradient


def separate_gradients(parameters: Iterable[Tensor]) -> None:
    """Copy gradients that overlap in memory, so that hooks can change each in place.

    ``torch.autograd.grad`` returns expanded tensors, and one tensor for two summands.
    ``backward`` may also let two parameters share memory, if one is joined by ``cat``.
    """
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            continue
        last = gradient.numel() - 1
        if not gradient.is_contiguous():
            sizes = zip(gradient.shape, gradient.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in sizes)
        if last >= 0:
            start = gradient.data_ptr()
            end = start + last * gradient.element_size()
            found.append((start, end, parameter, gradient))
    # Keep views that only have the same buffer, because a loop may clear this buffer.
    reached = -1
    for start, end, parameter, gradient in sorted(found, key=itemgetter(0)):
        if start <= reached or 0 in gradient.stride():
            parameter.grad = gradient.clone()
        reached = max(reached, end)


def facts_of(optimizer: torch.optim.Optimizer) -> Known:
    """Return the facts about an optimizer that the checks of methods read."""
    # A subclass with a step of its own, such as SAM, is another optimizer.
    step, of_sgd = inspect.unwrap(type(optimizer).step), torch.optim.SGD.step
    if not isinstance(optimizer, torch.optim.SGD) or step is not inspect.unwrap(of_sgd):
        return Known(optimizer=type(optimizer).__name__)
    groups = optimizer.param_groups
    return Known(
        optimizer="sgd",
        sgd_momentum=max(float(group["momentum"]) for group in groups),
        its_momentum="the optimizer's momentum",
        maximizes=any(group.get("maximize") for group in groups),
    )


def before_steps(
    optimizer: torch.optim.Optimizer,
    act: Callable[[torch.optim.Optimizer], float | Tensor],
) -> RemovableHandle:
    """Call ``act`` before every step of ``optimizer``, by a hook of torch.

    The gradients of the step have already been computed at this point.

    Args:
        optimizer: an optimizer that takes its own steps. If steps use closures, as
            in PyTorch Lightning, ``act`` runs after every call of the closure.
        act: changes the gradients before a step of the given optimizer. It returns the
            amount that the change adds to the loss, because a line search compares
            losses.

    Returns:
        The hook's handle. ``act`` is not called for a step that a fused optimizer skips
        because a scaled gradient is not finite.

    Raises:
        ConfigError: in a step, if a fused optimizer gets gradients that a gradient
            scaler has not unscaled.
    """

    def before(
        stepping: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # torch.amp.GradScaler leaves two tasks to a fused optimizer: to unscale the
        # gradients and to skip a step. It sets ``grad_scale`` and ``found_inf`` for
        # them.
        if getattr(stepping, "grad_scale", None) is not None:
            raise ConfigError(
                f"{type(stepping).__name__} is fused and its gradients are still"
                " scaled, so the method's term would have another scale. Call"
                " scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        if bool(getattr(stepping, "found_inf", False)):
            return None
        closure = kwargs.get("closure")
        if closure is None and len(args) > 1:
            closure = args[1]
        if closure is None:
            act(stepping)
            return None

        # Act in the closure, because inside the step it computes the gradients again,
        # maybe several times.
        def compute_and_act() -> Any:
            loss = closure()
            penalty = act(stepping)
            return None if loss is None else loss + penalty

        return args[:1], {**kwargs, "closure": compute_and_act}

    return optimizer.register_step_pre_hook(before)

"""The optimizers of local training.

They are torch's SGD, Adam and AdamW. Our settings replace some of torch's defaults.

Their methods are called without torch's wrappers. The wrappers import the compiler in
order to exclude the methods from compiled code. The import takes longer than 100 steps
of a small model, and over a network every message starts a process.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedbn_flwr.training.settings import LocalTraining

__all__ = [
    "PlainSGD",
    "dense_gradient",
    "make_optimizer",
    "sgd_step",
    "take_step",
]


class _Unwrapped(torch.optim.Optimizer):
    """An optimizer without torch's wrappers."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class PlainSGD(_Unwrapped, torch.optim.SGD):
    """SGD for use with ``sgd_step``."""


class _Adam(_Unwrapped, torch.optim.Adam):
    """Adam whose step has no wrappers either."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class _AdamW(_Unwrapped, torch.optim.AdamW):
    """AdamW whose step has no wrappers either."""

    # In torch 2.6, AdamW is not a subclass of Adam.
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def make_optimizer(model: nn.Module, settings: LocalTraining) -> torch.optim.Optimizer:
    """Return a new optimizer over the trainable parameters.

    SGD and Adam add the weight decay to the gradient; AdamW shrinks the weights by
    learning rate times weight decay.

    Args:
        model: the model.
        settings: name of the optimizer, learning rate, weight decay, momentum.

    Raises:
        ConfigError: the model has no trainable parameter.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    rate, decay = settings.learning_rate.initial, settings.weight_decay
    if settings.optimizer == "sgd":
        momentum = settings.sgd_momentum
        return PlainSGD(parameters, rate, momentum=momentum, weight_decay=decay)
    kind = _Adam if settings.optimizer == "adam" else _AdamW
    return kind(parameters, rate, weight_decay=decay)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Run ``optimizer.step()`` or an equivalent with the same bits."""
    # Use torch's step for a user's optimizer, because it may have Nesterov momentum or
    # hooks around its step.
    if type(optimizer) is PlainSGD:
        sgd_step(optimizer)
        return
    # Torch's Adam refuses sparse gradients.
    for group in optimizer.param_groups if isinstance(optimizer, _Unwrapped) else ():
        for parameter in group["params"]:
            dense_gradient(parameter)
    optimizer.step()


def dense_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter, after making a sparse gradient dense.

    An embedding may have a sparse gradient. Torch cannot add a dense tensor to it.
    """
    gradient = parameter.grad
    if gradient is not None and gradient.layout is not torch.strided:
        gradient = parameter.grad = gradient.to_dense()
    return gradient


@torch.no_grad()
def sgd_step(optimizer: PlainSGD) -> None:
    """Run ``optimizer.step()`` with the same bits, but faster for small models.

    A few calls update all parameters. Dampening and Nesterov momentum are not
    supported, because ``make_optimizer`` sets neither.
    """
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        gradients: Any = [p.grad for p in parameters]
        if not parameters:
            continue
        if group["weight_decay"]:
            gradients = [dense_gradient(p) for p in parameters]
            gradients = torch._foreach_add(
                gradients, parameters, alpha=group["weight_decay"]
            )
        if group["momentum"]:
            gradients = _with_momentum(optimizer, parameters, gradients, group)
        torch._foreach_add_(parameters, gradients, alpha=-group["lr"])


def _with_momentum(
    optimizer: PlainSGD,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[torch.Tensor],
    group: dict[str, Any],
) -> list[torch.Tensor]:
    """Return the momentum buffers, updated with these gradients."""
    states = [optimizer.state[p] for p in parameters]
    buffers: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    for state, gradient in zip(states, gradients, strict=True):
        if state.get("momentum_buffer") is None:
            # torch's first buffer is a copy of the gradient
            state["momentum_buffer"] = gradient.clone()
        else:
            buffers.append(state["momentum_buffer"])
            added.append(gradient)
    if buffers:
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, added)
    return [state["momentum_buffer"] for state in states]

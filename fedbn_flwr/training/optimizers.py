"""The optimizers of local training: torch's SGD, Adam and AdamW, with torch's defaults
besides our settings.

Their methods are called without torch's wrappers, which import the compiler to keep
them out of compiled code. The import takes longer than 100 steps of a small model, and
over a network every message starts a process.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.settings import LocalTraining

__all__ = ["PlainSGD", "make_optimizer", "sgd", "sgd_step", "take_step"]


class _Unwrapped(torch.optim.Optimizer):
    """An optimizer without torch's wrappers."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class PlainSGD(_Unwrapped, torch.optim.SGD):
    """SGD for ``sgd_step``."""


class _Adam(_Unwrapped, torch.optim.Adam):
    """Adam, also its step."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class _AdamW(_Unwrapped, torch.optim.AdamW):
    """AdamW, in the same way."""

    # in torch 2.6 it is no Adam
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def make_optimizer(
    model: nn.Module,
    settings: LocalTraining,
    known: Sequence[nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """Return a new optimizer over the trainable parameters; ``known``: the model's
    parameters, None = they are found.

    SGD and Adam add the weight decay to the gradient; AdamW shrinks the weights by
    learning rate times weight decay.

    Raises:
        ConfigError: there are none.
    """
    parameters = [p for p in known or model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(
            f"{type(model).__name__} has no parameter that requires a gradient: nothing"
            " to train"
        )
    if settings.optimizer == "sgd":
        return sgd(model, settings, parameters)
    kind = _Adam if settings.optimizer == "adam" else _AdamW
    return kind(
        parameters, settings.learning_rate.initial, weight_decay=settings.weight_decay
    )


def sgd(
    model: nn.Module,
    settings: LocalTraining,
    known: Sequence[nn.Parameter] | None = None,
) -> PlainSGD:
    """Return a new SGD optimizer over the trainable parameters (torch adds the weight
    decay to the gradient).

    ``known``: the model's parameters; None = they are found.
    """
    parameters = [p for p in known or model.parameters() if p.requires_grad]
    rate = settings.learning_rate.initial
    return PlainSGD(
        parameters,
        rate,
        momentum=settings.sgd_momentum,
        weight_decay=settings.weight_decay,
    )


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Do ``optimizer.step()``, with the same bits."""
    # A user's optimizer may have Nesterov momentum, or hooks around its step.
    if type(optimizer) is PlainSGD:
        sgd_step(optimizer)
    else:
        optimizer.step()


@torch.no_grad()
def sgd_step(optimizer: PlainSGD) -> None:
    """Do ``optimizer.step()`` with the same bits, for small models in a fraction of its
    time: a few calls for all parameters at once.

    It has no dampening and no Nesterov momentum: ``sgd`` sets neither.
    """
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        gradients: Any = [p.grad for p in parameters]
        if not parameters:
            continue
        if group["weight_decay"]:
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
    """Return the momentum buffers, moved on by these gradients."""
    states = [optimizer.state[p] for p in parameters]
    buffers: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    for state, gradient in zip(states, gradients, strict=True):
        if state.get("momentum_buffer") is None:
            # torch's first buffer is the gradient alone
            state["momentum_buffer"] = gradient.clone()
        else:
            buffers.append(state["momentum_buffer"])
            added.append(gradient)
    if buffers:
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, added)
    return [state["momentum_buffer"] for state in states]

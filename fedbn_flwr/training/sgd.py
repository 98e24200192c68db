"""Plain SGD: the optimizer of local training, and its step in a few calls for all
parameters at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedbn_flwr.training.settings import LocalTraining

__all__ = ["PlainSGD", "sgd", "sgd_step"]


class PlainSGD(torch.optim.SGD):
    """SGD whose methods are called without torch's wrapper, which imports the compiler
    to keep out of compiled code.

    The import takes longer than 100 steps of a small model, and over a network every
    message starts a process.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


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


@torch.no_grad()
def sgd_step(optimizer: PlainSGD) -> None:
    """Do ``optimizer.step()`` with the same bits, in a fraction of its time for small
    models.

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
            states = [optimizer.state[p] for p in parameters]
            known = [
                (s["momentum_buffer"], g)
                for s, g in zip(states, gradients, strict=True)
                if _begun(s)
            ]
            if known:
                buffers, added = map(list, zip(*known, strict=True))
                torch._foreach_mul_(buffers, group["momentum"])
                torch._foreach_add_(buffers, added)
            for state, gradient in zip(states, gradients, strict=True):
                if not _begun(state):
                    state["momentum_buffer"] = gradient.clone()
            gradients = [state["momentum_buffer"] for state in states]
        torch._foreach_add_(parameters, gradients, alpha=-group["lr"])


def _begun(state: dict[str, Any]) -> bool:
    return state.get("momentum_buffer") is not None

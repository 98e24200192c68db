"""The forward and backward pass of a step of local training. Torch only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.training.client_hook import ClientHook, LossAndOutputs
from fedbn_flwr.training.memory_format import device_of
from fedbn_flwr.training.tasks import Task
from fedbn_flwr.training.wrappers import unwrap

__all__ = ["forward_backward"]


def forward_backward(
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    optimizer: torch.optim.Optimizer,
    hooks: Sequence[ClientHook],
    task: Task,
    amp: bool,
) -> LossAndOutputs:
    """Set the gradients of the optimizer's parameters; return the mean loss and the
    outputs.
    """
    with (
        torch.autocast(device_of(model).type, torch.bfloat16) if amp else nullcontext()
    ):
        outputs = model(inputs)
        task.check(outputs, targets)
        loss = task.loss(outputs, targets)
    total = loss
    for hook in hooks:
        if (penalty := hook.penalty(unwrap(model))) is not None:
            total = total + penalty
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    total.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), outputs.detach()

"""``StepRule``: how a step of local training draws its batch and computes its gradients. Torch only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.training.client_hook import ClientHook, LossAndOutputs
from fedbn_flwr.training.memory_format import device_of
from fedbn_flwr.training.settings import LocalTraining
from fedbn_flwr.training.tasks import Task
from fedbn_flwr.training.wrappers import unwrap

__all__ = ["StepRule", "Stream"]

Stream = Callable[[str], torch.Generator]


class StepRule:
    """How a step draws its batch and computes its gradients: here as the settings say, in one backward pass.

    Attributes:
        may_drop: whether a batch of one example is left out if a BatchNorm would see one value per channel.
    """

    may_drop = True

    def stream(self, stream: Stream) -> Stream:
        """Return what makes the generators of a round, given that of ``train``."""
        return stream

    def batches(
        self, model: nn.Module, settings: LocalTraining, num_examples: int, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Yield the positions of each step's batch, int64 (B,); an empty batch is a step, too.

        The model is ready to train; it is not changed here.
        """
        return settings.batches(num_examples, generator)

    def compute(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Tensor,
        optimizer: torch.optim.Optimizer,
        hooks: Sequence[ClientHook],
        task: Task,
        amp: bool,
    ) -> LossAndOutputs:
        """Do the forward and backward pass of a step: set the gradients of the optimizer's parameters."""
        with torch.autocast(device_of(model).type, torch.bfloat16) if amp else nullcontext():
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

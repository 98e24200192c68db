"""Search for the cause of a non-finite loss in the model. Torch only."""

from __future__ import annotations

import torch
from torch import nn

from fedbn_flwr.errors import FIRST_PASS_NOT_FINITE, DataError, coded
from fedbn_flwr.training.batches import Batches, device_of, inputs_for
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.tasks import Task

# Largest usual size of a weight. Larger weights may result from earlier steps that were
# too large.
_USUAL = 1000


def refuse_first_pass(
    model: nn.Module, data: Batches, task: Task, batch_size: int
) -> None:
    """Search for the cause of a non-finite loss in passes with the received weights.

    The model has these weights; the passes change its buffers. Nothing is checked if a
    weight is unusually large, because the weight may be the cause.

    Raises:
        DataError: the loss of a batch, or a gradient, is not finite.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if any(p.detach().abs().max() > _USUAL for _, p in named if p.numel()):
        return
    prepared, device = inputs_for(model), device_of(model)
    with seeded(0):
        model.train()
        for positions in torch.split(torch.arange(len(data)), batch_size or len(data)):
            inputs, targets = data.batch(positions, torch.Generator())
            targets = task.on_device(targets, device)
            # Skip a batch if BatchNorm may have no variance, or the loss no target.
            if len(positions) < 2 or not task.counted(targets):
                continue
            loss, _ = task.step(model, prepared(inputs), targets)
            gradients = torch.autograd.grad(
                loss, [p for _, p in named], allow_unused=True
            )
            found = {"the loss": loss}
            for (name, _), gradient in zip(named, gradients, strict=True):
                if gradient is not None:
                    found[f"the gradient of '{name}'"] = gradient
            for what, value in found.items():
                if not value.isfinite().all():
                    text = (
                        f"{what} is not finite for the received weights, before any"
                        " step. Check the model and the loss for a logarithm, root or"
                        " division by 0, for class weights of 0, and for numbers out of"
                        f" the range of {value.dtype}. Another learning rate does not"
                        " help."
                    )
                    raise DataError(coded(FIRST_PASS_NOT_FINITE, text))

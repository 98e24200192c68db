"""The one function that evaluates: always in eval mode, and the modes are restored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.training import Batches, LossFn, as_model_input

__all__ = ["EvalResult", "evaluate"]


@dataclass(frozen=True)
class EvalResult:
    """Mean loss and accuracy over ``num_examples`` examples."""

    loss: float
    accuracy: float
    num_examples: int


def evaluate(
    model: nn.Module, data: Batches, *, loss_fn: LossFn = F.cross_entropy, batch_size: int = 500
) -> EvalResult:
    """Evaluate ``model`` in eval mode on all of ``data``; every module's mode is restored afterwards.

    Returns:
        Mean loss (each example counts once, also in a smaller last batch), accuracy in [0, 1]; NaN without examples.
    """
    if len(data) == 0:
        return EvalResult(float("nan"), float("nan"), 0)
    parameter = next(model.parameters())
    modes = {module: module.training for module in model.modules()}
    totals = torch.zeros(2, dtype=torch.float64, device=parameter.device)
    model.eval()
    try:
        with torch.inference_mode():
            for positions in torch.split(torch.arange(len(data)), batch_size):
                inputs, targets = data.batch(positions)
                outputs = model(as_model_input(inputs, parameter.device, parameter.dtype))
                targets = targets.to(parameter.device)
                totals[0] += loss_fn(outputs, targets).double() * len(positions)
                totals[1] += (outputs.argmax(1) == targets).sum()
    finally:
        for module, mode in modes.items():
            module.training = mode
    loss, correct = (totals / len(data)).tolist()
    return EvalResult(loss, correct, len(data))

"""The one function that evaluates: always in eval mode, and the modes are restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.training import Batches, LossFn, as_model_input

__all__ = ["EvalResult", "evaluate"]


@dataclass(frozen=True)
class EvalResult:
    """Mean loss and accuracy over ``num_examples`` examples."""

    loss: float
    accuracy: float
    num_examples: int


def evaluate(
    model: nn.Module,
    data: Batches,
    *,
    loss_fn: LossFn = F.cross_entropy,
    batch_size: int = 500,
    batch_statistics: bool = False,
) -> EvalResult:
    """Evaluate ``model`` in eval mode on all of ``data``; every module's mode is restored afterwards.

    Args:
        model: the model.
        data: the test data, in batches in their order.
        loss_fn: mean loss of a batch.
        batch_size: examples per batch.
        batch_statistics: BatchNorm normalises with the test batch's own statistics in place of the running ones, which
            are neither used nor changed; everything else is in eval mode.

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
        with torch.inference_mode(), _without_running_statistics(model) if batch_statistics else nullcontext():
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


@contextmanager
def _without_running_statistics(model: nn.Module) -> Iterator[None]:
    """Take the running statistics away: a BatchNorm in eval mode without them uses its batch's own."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    kept = [(layer, layer.running_mean, layer.running_var) for layer in layers]
    try:
        for layer in layers:
            layer.running_mean = layer.running_var = None
        yield
    finally:
        for layer, mean, var in kept:
            layer.running_mean, layer.running_var = mean, var

"""The function that evaluates a model: always in eval mode, and afterwards every mode is restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.training.loop import Batches, kept_modes, with_positions
from fedbn_flwr.training.memory_format import inputs_for
from fedbn_flwr.training.tasks import CLASSIFICATION, Task, confusion, mean_iou

__all__ = ["EvalResult", "evaluate"]


@dataclass(frozen=True)
class EvalResult:
    """The result of one evaluation.

    Attributes:
        loss: mean loss of the targets that count.
        accuracy: share of these targets that is classified correctly.
        num_examples: number of images.
        miou: mean intersection over union, see ``tasks.mean_iou``; None for a task with another score.
    """

    loss: float
    accuracy: float
    num_examples: int
    miou: float | None = None

    def named(self, prefix: str = "") -> dict[str, float]:
        """Return the metrics that are not None, with ``prefix`` before each name."""
        metrics = {"loss": self.loss, "accuracy": self.accuracy, "miou": self.miou}
        return {prefix + name: value for name, value in metrics.items() if value is not None}


def evaluate(
    model: nn.Module,
    data: Batches,
    *,
    task: Task = CLASSIFICATION,
    batch_size: int = 0,
    batch_statistics: bool = False,
) -> EvalResult:
    """Return the metrics of ``model`` on all of ``data`` in eval mode; afterwards every module has its mode again.

    Args:
        model: the model.
        data: the test data; batches follow their order.
        task: the loss, which targets count, and the score.
        batch_size: examples per batch; 0 = the task's number.
        batch_statistics: BatchNorm normalises with the test batch's own statistics. The running statistics are neither
            used nor changed, and all other layers are in eval mode.

    Returns:
        Mean loss (every target has the same weight, also in a smaller last batch), accuracy in [0, 1], and mean IoU if
        it is the task's score. NaN if no target counts.

    Raises:
        DataError: the model gives one output per example, or the targets are not class numbers.
    """
    if len(data) == 0:
        return EvalResult(float("nan"), float("nan"), 0)
    device, prepared = next(model.parameters()).device, inputs_for(model)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # summed loss, correct, counted
    matrix: torch.Tensor | None = None
    statistics = _without_running_statistics(model) if batch_statistics else nullcontext()
    with kept_modes(model), torch.inference_mode(), statistics:
        model.eval()
        order = torch.split(torch.arange(len(data)), batch_size or task.test_batch)
        for _, (inputs, targets) in with_positions(data, order):
            outputs = model(prepared(inputs))
            targets = task.on_device(targets, device)
            task.check(outputs, targets)
            counted = task.counted(targets)
            totals += torch.stack(
                [task.loss(outputs, targets).double() * counted, (outputs.argmax(1) == targets).sum(), counted]
            )
            if task.score == "miou":
                counts = confusion(outputs, targets, task.ignore)
                matrix = counts if matrix is None else matrix + counts
    loss, correct, _ = (totals / totals[2]).tolist()
    return EvalResult(loss, correct, len(data), None if matrix is None else mean_iou(matrix))


@contextmanager
def _without_running_statistics(model: nn.Module) -> Iterator[None]:
    """Remove the running statistics in the block: a BatchNorm without them uses its batch's own, also in eval mode."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    kept = [(layer, layer.running_mean, layer.running_var) for layer in layers]
    try:
        for layer in layers:
            layer.running_mean = layer.running_var = None
        yield
    finally:
        for layer, mean, var in kept:
            layer.running_mean, layer.running_var = mean, var

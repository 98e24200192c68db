"""The function that evaluates a model.

It evaluates in eval mode. Afterwards the model has its modes and attributes again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.training.batches import (
    Batches,
    device_of,
    inputs_for,
    join_last,
    with_positions,
)
from fedbn_flwr.training.freezing import in_mode, layers_of
from fedbn_flwr.training.metrics import accuracy, confusion, of_counts
from fedbn_flwr.training.single_examples import raise_named, takes_one_example
from fedbn_flwr.training.tasks import CLASSIFICATION, Task

__all__ = ["EvalResult", "evaluate"]


@dataclass(frozen=True)
class EvalResult:
    """The result of one evaluation.

    A target counts if it is known and is not ignored by the task.

    Attributes:
        loss: mean loss of the targets that count.
        num_examples: number of examples with a target that counts.
        metrics: the metrics of the task by name; a metric is NaN if it is not defined
            on the test set.
    """

    loss: float
    num_examples: int
    metrics: Mapping[str, float]

    def named(self, prefix: str = "") -> dict[str, float]:
        """Return the loss and the metrics, with ``prefix`` before each name."""
        values = {"loss": self.loss, **self.metrics}
        return {prefix + name: value for name, value in values.items()}


def evaluate(
    model: nn.Module,
    data: Batches,
    *,
    task: Task = CLASSIFICATION,
    batch_size: int = 0,
    on_batch: Callable[[Tensor, Tensor], None] | None = None,
) -> EvalResult:
    """Return the metrics of ``model`` on all of ``data``, in eval mode.

    Afterwards, the mode and the attributes of every module are restored, so a cache
    that a layer fills in eval mode does not reach the next test.

    Args:
        model: the model.
        data: the test data; batches follow their order. The last two batches are joined
            if the last has one example that a BatchNorm layer without running
            statistics cannot use.
        task: defines the loss, the counted targets and the score.
        batch_size: examples per batch. 0 means the default of the task. A task has a
            separate default for models whose BatchNorm layers use the batch's
            statistics.
        on_batch: called with the outputs (B, ...) and the targets (B, ...) of each
            batch, in order.

    Returns:
        The mean loss and the metrics of the task. Each target has the same weight, even
        if the last batch is smaller. All values are NaN if no target counts.

    Raises:
        DataError: outputs or targets do not fit the task.
        NormLayerError: a BatchNorm without running statistics gets one value per
            channel.
    """
    if len(data) == 0:
        return EvalResult(float("nan"), 0, dict.fromkeys(task.metrics, float("nan")))
    device, prepared = device_of(model), inputs_for(model)
    sums = _Sums(task)
    # Do not use inference_mode: if the model keeps a tensor from it, training fails on
    # this tensor.
    with in_mode(model, False), torch.no_grad():
        # If a layer uses the batch's statistics, the metrics depend on the batch size.
        size = batch_size or task.plain_test_batch or task.test_batch
        layers = layers_of(model).values()
        if not batch_size and any(layer.running_mean is None for layer in layers):
            size = task.test_batch
        order: Sequence[Tensor] = torch.split(torch.arange(len(data)), size)
        if len(order[-1]) == 1:
            order = _joined(model, data, order, prepared)
        with closing(with_positions(data, order)) as batches:
            for positions, (inputs, targets) in batches:
                try:
                    outputs = model(prepared(inputs))
                except ValueError as error:
                    # torch's error for one value per channel does not name the layer
                    raise_named(error, model, len(positions))
                targets = task.on_device(targets, device)
                task.check(outputs, targets)
                sums.add(outputs, targets)
                if on_batch:
                    on_batch(outputs, targets)
        return sums.result()


@dataclass
class _Sums:
    """Sums over the batches of a test, read from the device only at the end."""

    task: Task
    # per batch: mean loss, correct, counted targets, examples with a counted target
    batches: list[Tensor] = field(default_factory=list)
    confusion: Tensor | None = None
    gathered: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    unusable: list[Tensor] = field(default_factory=list)

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch's outputs (B, classes, ...) and its targets (B, ...)."""
        task = self.task
        counting = task.counting(targets)
        counted = counting.sum()
        examples = counted
        if targets.ndim > 1:
            examples = counting.flatten(1).any(1).sum()
        loss = task.loss(outputs, targets).double()
        correct = task.right(outputs, targets).sum()
        self.batches.append(torch.stack([loss, correct, counted, examples]))
        # Only count pixels, because all outputs of a test would not fit into memory.
        if task.by_pixel and {"miou", "dice"}.intersection(task.metrics):
            counts = confusion(outputs, targets, task.ignore)
            if self.confusion is not None:
                counts = self.confusion + counts
            self.confusion = counts
        if task.metrics_of_all_outputs:
            self.gathered.append((outputs, targets))
        wrong = task.unusable(targets)
        if wrong is not None:
            self.unusable.append(wrong)

    def result(self) -> EvalResult:
        """Return the result of the test.

        Raises:
            DataError: targets have values that do not exist in the task.
        """
        if self.unusable:
            self.task.refuse(int(torch.stack(self.unusable).sum()))
        total_loss = total_correct = total_counted = num_examples = 0.0
        for loss, correct, counted, examples in torch.stack(self.batches).tolist():
            if counted:  # torch's mean over no target is NaN
                total_loss += loss * counted
            total_correct += correct
            total_counted += counted
            num_examples += examples
        mean_over = total_counted or math.nan
        metrics = {"accuracy": accuracy(total_correct, total_counted)}
        if self.confusion is not None:
            metrics = of_counts(self.confusion)
        if self.gathered:
            outputs = torch.cat([batch[0] for batch in self.gathered]).cpu()
            targets = torch.cat([batch[1] for batch in self.gathered]).cpu()
            metrics |= self.task.measure(outputs, targets)
        # The number of examples is the client's weight in means over the clients. It is
        # 0 if no target of the test counts.
        return EvalResult(
            total_loss / mean_over,
            int(num_examples),
            {name: metrics[name] for name in self.task.metrics},
        )


def _joined(
    model: nn.Module,
    data: Batches,
    order: Sequence[Tensor],
    prepared: Callable[[Any], Any],
) -> Sequence[Tensor]:
    """Return the positions of each batch, for a last batch of one example.

    The last two batches are joined if a BatchNorm layer without running statistics
    cannot compute a variance from the last example.
    """
    layers = layers_of(model).values()
    if len(order) == 1 or all(layer.running_mean is not None for layer in layers):
        return order
    takes_one = takes_one_example(model, prepared(data.batch(order[-1])[0]))
    return order if takes_one else join_last(order)

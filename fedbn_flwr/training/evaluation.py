"""The function that evaluates a model.

It evaluates in eval mode. Afterwards the model has its modes and attributes again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.training.batches import (
    Batches,
    device_of,
    inputs_for,
    with_positions,
)
from fedbn_flwr.training.borrowed import lending
from fedbn_flwr.training.freezing import in_mode, layers_of
from fedbn_flwr.training.metrics import confusion, of_counts
from fedbn_flwr.training.model_state import unwrap
from fedbn_flwr.training.single_examples import joined, raise_named
from fedbn_flwr.training.sums import Sums
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
    sums = _TestSums(task)
    # Do not use inference_mode: if the model keeps a tensor from it, training fails on
    # this tensor.
    with in_mode(model, False), torch.no_grad():
        # If a layer uses the batch's statistics, the metrics depend on the batch size.
        size = batch_size or task.plain_test_batch or task.test_batch
        layers = layers_of(model).values()
        of_batch = any(layer.running_mean is None for layer in layers)
        if not batch_size and of_batch:
            size = task.test_batch
        order: Sequence[Tensor] = torch.split(torch.arange(len(data)), size)
        if of_batch and len(order) > 1:
            second = lending(unwrap(model), task)
            order = joined(model, data, order, prepared, second)
        size = 0

        def read(first: bool = False) -> Generator[tuple[Any, Any]]:
            nonlocal size
            with closing(with_positions(data, order)) as batches:
                for positions, (inputs, targets) in batches:
                    size = len(positions)
                    inputs = prepared(inputs)
                    targets = task.on_device(targets, device)
                    if first:
                        number = len(sums.sizes)
                        loss, outputs = task.tested(model, inputs, targets, number)
                        sums.add(loss, size, outputs, targets)
                        if on_batch and outputs is not None:
                            on_batch(outputs, targets)
                    yield inputs, targets

        try:
            with closing(read(first=True)) as passed:
                metrics = task.measured(model, _Passes([passed], read))
                for _ in passed:  # the test may have left batches
                    pass
        except ValueError as error:
            # torch's error for one value per channel does not name the layer
            raise_named(error, model, size)
        return sums.result(metrics)


@dataclass(frozen=True)
class _Passes:
    """Batches of which each pass after the first reads the data again."""

    first: list[Iterator[tuple[Any, Any]]]
    read: Callable[[], Iterator[tuple[Any, Any]]]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self.first.pop() if self.first else self.read()


@dataclass
class _TestSums(Sums):
    """The sums of a test, and what its metrics need in addition."""

    confusion: Tensor | None = None
    gathered: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(
        self, loss: Tensor, size: int, outputs: Tensor | None, targets: Any
    ) -> None:
        """Add a batch."""
        super().add(loss, size, outputs, targets)
        if outputs is None:
            return
        # Only count pixels, because all outputs of a test would not fit into memory.
        if self.task.by_pixel and {"miou", "dice"}.intersection(self.task.metrics):
            counts = confusion(outputs, targets, self.task.ignore)
            if self.confusion is not None:
                counts = self.confusion + counts
            self.confusion = counts
        if self.task.metrics_of_all_outputs:
            self.gathered.append((outputs, targets))

    def result(self, measured: Mapping[str, float]) -> EvalResult:
        """Return the result of the test, with the metrics of a user's task.

        Raises:
            DataError: targets have values that do not exist in the task.
        """
        self.read()
        metrics = {"accuracy": self.accuracy}
        if self.confusion is not None:
            metrics = of_counts(self.confusion)
        if self.gathered:
            outputs = torch.cat([batch[0] for batch in self.gathered]).cpu()
            targets = torch.cat([batch[1] for batch in self.gathered]).cpu()
            metrics |= self.task.measure(outputs, targets)
        # The number of examples is the client's weight in means over the clients. It is
        # 0 if no target of the test counts.
        return EvalResult(
            self.mean_loss(self.counted),
            self.examples,
            measured or {name: metrics[name] for name in self.task.metrics},
        )

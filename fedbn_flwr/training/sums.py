"""Sums over the batches of a training or of a test. Torch only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr.training.metrics import accuracy
from fedbn_flwr.training.tasks import Task

__all__ = ["Sums"]


@dataclass
class Sums:
    """Sums over batches, read from the device only by ``read``.

    Attributes:
        task: the task of the batches.
        sizes: the number of examples of each batch.
        losses: the mean loss of each batch.
        counted: the counted targets of each batch.
        accuracy: the share of correct targets among those that count.
        examples: the number of examples with a counted target.
    """

    task: Task
    sizes: list[int] = field(default_factory=list)
    losses: list[float] = field(init=False)
    counted: list[int] = field(init=False)
    accuracy: float = field(init=False)
    examples: int = field(init=False)
    _rows: list[tuple[Tensor, ...]] = field(default_factory=list)
    _unusable: list[Tensor] = field(default_factory=list)

    def add(
        self, loss: Tensor, size: int, outputs: Tensor | None, targets: Any
    ) -> None:
        """Add a batch.

        The outputs are (B, classes, ...), the targets (B, ...). Without outputs, as in a
        user's task, every example counts.
        """
        self.sizes.append(size)
        if outputs is None:
            whole = torch.tensor(size)
            self._rows.append((loss, torch.zeros(()), whole, whole))
            return
        task = self.task
        counting = task.counting(targets)
        counted = examples = counting.sum()
        if targets.ndim > 1:
            examples = counting.flatten(1).any(1).sum()
        correct = task.right(outputs, targets).sum()
        self._rows.append((loss, correct, counted, examples))
        wrong = task.unusable(targets)
        if wrong is not None:
            self._unusable.append(wrong)

    def read(self) -> None:
        """Read the sums from the device.

        Raises:
            DataError: targets have values that do not exist in the task.
        """
        if self._unusable:
            self.task.refuse(int(torch.stack(self._unusable).sum()))
        columns = [
            torch.stack(column).tolist() for column in zip(*self._rows, strict=True)
        ]
        self.losses, correct, self.counted, examples = columns
        self.accuracy = accuracy(sum(correct), sum(self.counted))
        self.examples = sum(examples)

    def mean_loss(self, weights: Sequence[int]) -> float:
        """Return the mean of the losses, weighted by the weights of the batches.

        A batch without counted targets has loss 0, because torch's mean over an empty
        set of targets is NaN.
        """
        total = 0.0  # not sum(): it rounds differently since Python 3.12
        for loss, counted, weight in zip(
            self.losses, self.counted, weights, strict=True
        ):
            if counted:
                total += loss * weight
        return total / (sum(weights) or math.nan)

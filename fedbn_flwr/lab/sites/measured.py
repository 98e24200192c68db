"""What a model gives for the examples of one site, kept until the site's metric and its interval are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr.lab.sites.intervals import Classes, Estimate, Gap, difference, estimate, mcnemar
from fedbn_flwr.lab.sites.statistics import Indices, MeanOf, Statistic, statistic
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.metrics import confusion
from fedbn_flwr.training.tasks import LabelTask, RegressionTask, Task

__all__ = ["Gathered", "Measured", "SiteData", "gap", "measure"]

_BLOCKS = 500  # more groups than these are left out several at a time: the work grows with their square
_SEED = 0  # of which groups make a block


class SiteData(Batches, Protocol):
    """The examples of a site."""

    @property
    def targets(self) -> Tensor:
        """The targets, (N, ...)."""

    @property
    def units(self) -> Tensor | None:
        """The group (patient) of each example, int64 (N,); None = each example is one by itself."""


@dataclass(frozen=True)
class Measured:
    """The outputs of one model for the examples of a site.

    Attributes:
        task: the learning task; its score is the metric.
        outputs: (N, ...), as ``statistics.statistic`` takes them, float64 on the CPU.
        targets: (N, ...).
        groups: the group of each example, 0..num_groups - 1.
        num_groups: the number of groups.
    """

    task: Task
    outputs: Tensor
    targets: Tensor
    groups: Indices
    num_groups: int

    def __len__(self) -> int:
        return len(self.targets)

    def estimate(self) -> Estimate:
        """Return the main metric with its interval."""
        if not len(self):
            return Estimate(None, reason="no test examples")
        if not self.outputs.isfinite().all():
            return Estimate(None, reason="the model's outputs are not finite")
        return estimate(self.task.score, self.statistic(), self.classes(), self.num_groups)

    def statistic(self) -> Statistic:
        """Return the main metric as a function of the weights of blocks of groups."""
        blocks, count = self._blocks()
        return statistic(self.task.score, self.task, self.outputs, self.targets, blocks[self.groups], count)

    def classes(self) -> Classes:
        """Return the classes of the blocks of groups."""
        blocks, count = self._blocks()
        columns = _class_columns(self.task, self.targets)
        if columns is None:
            return Classes(np.zeros(count, np.int64), 0)
        has = np.zeros((self.num_groups, columns.shape[1]), bool)
        np.logical_or.at(has, self.groups, columns)
        of_blocks = np.zeros((count, columns.shape[1]), bool)
        np.logical_or.at(of_blocks, blocks, has)
        present = has.sum(0)
        pattern = np.unique(of_blocks, axis=0, return_inverse=True)[1].reshape(-1)
        if isinstance(self.task, LabelTask):  # of each label both classes are needed
            pairs = present.reshape(-1, 2)
            defined = pairs[pairs.min(1) > 0]
            return Classes(pattern, int(defined.min()) if len(defined) else 0)
        present = present[present > 0]
        return Classes(pattern, int(present.min()) if len(present) > 1 else 0)

    def _blocks(self) -> tuple[Indices, int]:
        """Return the block of each group, and the number of blocks."""
        count = min(self.num_groups, _BLOCKS)
        order = np.arange(self.num_groups)
        if count < self.num_groups:
            order = np.random.default_rng(_SEED).permutation(order)
        return order % count, count


class Gathered:
    """What a test gives for the examples of a site, batch by batch.

    Args:
        task: the learning task; its score is the metric.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._kept: list[tuple[Tensor, Tensor]] = []

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Keep a batch: ``on_batch`` of ``evaluate``."""
        task = self._task
        if task.score == "loss":
            self._kept.append((_losses(task, outputs, targets), targets.cpu()))
        elif task.by_pixel:
            each = [confusion(outputs[i : i + 1], targets[i : i + 1], task.ignore) for i in range(len(outputs))]
            self._kept.append((torch.stack(each).cpu().double(), torch.zeros(len(outputs))))
        else:
            self._kept.append((outputs.cpu().double(), targets.cpu()))

    def measured(self, data: SiteData) -> Measured:
        """Return all that was kept; ``data`` are the examples that were tested."""
        parts = zip(*self._kept, strict=True) if self._kept else ([torch.empty(0, 1)], [torch.empty(0)])
        outputs, targets = map(torch.cat, parts)
        units = None if data.units is None else data.units.cpu().numpy()
        names, groups = np.unique(np.arange(len(targets)) if units is None else units, return_inverse=True)
        return Measured(self._task, outputs, targets, groups.astype(np.int64), len(names))


def measure(model: nn.Module, data: SiteData, task: Task) -> Measured:
    """Return what a model gives for the examples of a site; it is tested as ``evaluate`` tests it."""
    gathered = Gathered(task)
    evaluate(model, data, task=task, on_batch=gathered.add)
    return gathered.measured(data)


def gap(one: Sequence[Measured], other: Sequence[Measured]) -> Gap:
    """Return the difference of the metric of two methods on the same examples; of several runs each, their mean.

    With one run each and one example a group, McNemar's test says whether accuracies differ.
    """
    first = one[0]
    every = [*one, *other]
    if not len(first) or not all(measured.outputs.isfinite().all() for measured in every):
        return Gap(None)
    p = None
    if first.task.score == "accuracy" and len(every) == 2 and first.num_groups == len(first):
        right = [_right(measured) for measured in every]
        if right[0] is not None and right[1] is not None:
            p = mcnemar(int((right[0] & ~right[1]).sum()), int((~right[0] & right[1]).sum()))
    mine, others = (MeanOf([measured.statistic() for measured in runs]) for runs in (one, other))
    return difference(first.task.score, mine, others, first.classes(), first.num_groups, p)


def _losses(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss of each example and its number of targets, float64 (B, 2)."""
    rows = []
    for i in range(len(outputs)):
        counted = task.counted(targets[i : i + 1])
        loss = task.loss(outputs[i : i + 1], targets[i : i + 1]).double() * counted
        rows.append(torch.stack([torch.where(counted > 0, loss, 0.0), counted.double()]))
    return torch.stack(rows).cpu()


def _right(measured: Measured) -> Tensor | None:
    """Return whether each example is right; None if examples have several targets, or one is unknown."""
    task, outputs, targets = measured.task, measured.outputs, measured.targets
    if task.by_pixel or (isinstance(task, LabelTask) and not task.single) or bool(targets.isnan().any()):
        return None
    if isinstance(task, LabelTask):
        return (outputs.flatten() > 0) == (targets.flatten() > 0)
    return outputs.argmax(1) == targets


def _class_columns(task: Task, targets: Tensor) -> np.ndarray | None:
    """Return which classes each example has, (N, columns); None where the task has no classes of examples.

    Of labels the columns are no, yes of each label.
    """
    if task.by_pixel or isinstance(task, RegressionTask):
        return None
    if isinstance(task, LabelTask):
        labels = targets.double().reshape(len(targets), -1).numpy()
        return np.stack([labels == 0, labels == 1], 2).reshape(len(labels), -1)
    classes = targets.numpy()
    kept = np.unique(classes[classes != task.ignore])
    return np.asarray(classes[:, None] == kept)

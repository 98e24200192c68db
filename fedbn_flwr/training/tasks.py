"""The learning tasks: what their targets, loss and metrics are. Torch only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.training.losses import (
    IGNORED_PIXEL,
    LossFn,
    label_cross_entropy,
    pixel_cross_entropy,
    squared_error,
)
from fedbn_flwr.training.metrics import of_classes, of_labels, of_numbers

__all__ = [
    "BINARY",
    "CLASSIFICATION",
    "METRICS",
    "MULTI_LABEL",
    "REGRESSION",
    "SEGMENTATION",
    "TASKS",
    "LabelTask",
    "RegressionTask",
    "Task",
    "higher_is_better",
    "in_percent",
    "quantity_of",
]

# metrics that ``evaluate`` counts batch by batch
_COUNTED = ("accuracy", "miou", "dice")
_NO_SHARES = ("mae", "rmse", "r2", "loss")
_LOWER_IS_BETTER = ("loss", "mae", "rmse")
_LOSS = "loss"  # which every test has


@dataclass(frozen=True)
class Task:
    """A task: its loss, the targets that its tests count, and its metrics.

    Targets of this class are numbers of classes, one for each example or pixel;
    subclasses have others.

    Attributes:
        name: the name in messages.
        loss: mean loss of a batch of (outputs (B, classes, ...), targets (B, ...)).
            With class weights the loss of a test depends on how its examples fall into
            batches, since each is divided by its own weights.
        ignore: targets with this value neither train nor count.
        score: the main metric of a run: one of ``metrics``, or the loss.
        test_batch: examples per test batch. It limits the memory, and it changes the
            last bits of sums.
        plain_test_batch: examples per batch of a test whose BatchNorm layers have
            running statistics, so that only the last bits depend on it; 0 =
            ``test_batch``.
        metrics: names of the metrics of every test, in order; () = the accuracy and the
            score.
        by_pixel: whether each pixel has a target.
        training_loss: the loss of training steps, such as one with class weights; None
            = ``loss``, as in tests.

    Raises:
        ConfigError: the task does not have these metrics.
    """

    name: str = "classification"
    loss: LossFn = F.cross_entropy
    ignore: int = -100
    score: str = "accuracy"
    test_batch: int = 500
    metrics: tuple[str, ...] = ()
    plain_test_batch: int = 0
    by_pixel: bool = False
    training_loss: LossFn | None = None

    def __post_init__(self) -> None:
        """Check the metrics."""
        # each once: the accuracy may be the score
        names = self.metrics or tuple(dict.fromkeys(("accuracy", self.score)))
        object.__setattr__(self, "metrics", names)
        self._refuse("metrics", names, self.allowed)

    def _refuse(self, key: str, names: Sequence[str], allowed: Sequence[str]) -> None:
        wrong = [name for name in names if name not in allowed]
        if wrong:
            raise ConfigError(
                f"{key}={', '.join(wrong)}: task {self.name} has {', '.join(allowed)}"
            )

    @property
    def allowed(self) -> tuple[str, ...]:
        """The metrics that the task can have."""
        if self.by_pixel:
            return _COUNTED
        return ("accuracy", "balanced-accuracy", "macro-f1", "auroc", "auprc")

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher score is better."""
        return higher_is_better(self.score)

    @property
    def metrics_of_all_outputs(self) -> list[str]:
        """The metrics that need all outputs and targets of a test at once."""
        return [name for name in self.metrics if name not in _COUNTED]

    def measuring(self, names: Sequence[str]) -> Task:
        """Return this task with further metrics.

        Raises:
            ConfigError: the task does not have them.
        """
        metrics = tuple(dict.fromkeys((*self.metrics, *names)))
        return dataclasses.replace(self, metrics=metrics)

    def scored_by(self, metric: str) -> Task:
        """Return this task with another main metric: one of ``allowed``, or "loss".

        Raises:
            ConfigError: the task does not have it; the error names those that it has.
        """
        self._refuse("metrics", [metric], [*self.allowed, _LOSS])
        task = self if metric == _LOSS else self.measuring([metric])
        return dataclasses.replace(task, score=metric)

    def outputs(self, num_classes: int) -> int:
        """Return the number of outputs of a model for data with this number of classes,
        labels or target columns.
        """
        return num_classes

    def probabilities(self) -> nn.Module:
        """Return the layer that makes probabilities of the outputs (N, classes, ...);
        numbers stay numbers.
        """
        return nn.Softmax(1)

    def counting(self, targets: Tensor) -> Tensor:
        """Return which targets count."""
        return targets != self.ignore

    def counted(self, targets: Tensor) -> Tensor:
        """Return how many targets count: images, or pixels."""
        return self.counting(targets).sum()

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return how many targets that count are right; 0 where the task has no
        accuracy.
        """
        return (outputs.argmax(1) == targets).sum()

    def unusable(self, targets: Tensor) -> Tensor | None:
        """Return how many targets have values that the task does not have; None if the
        loss finds them.
        """
        return None

    def refuse(self, unusable: int) -> None:
        """Raise DataError if there are unusable targets."""

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the ``metrics_of_all_outputs`` for all outputs (N, ...) and targets
        (N, ...) of a test.
        """
        kept = targets != self.ignore
        return of_classes(
            self.metrics_of_all_outputs, outputs[kept].double(), targets[kept]
        )

    @staticmethod
    def on_device(targets: Any, device: torch.device) -> Tensor:
        """Return a batch's targets on the device, classes as int64.

        Raises:
            DataError: they are no tensor.
        """
        if not isinstance(targets, Tensor):
            raise DataError(
                f"labels are a {type(targets).__name__}; a tensor needed (int64 for"
                " classes)."
            )
        moved: Tensor = targets.to(device)
        if moved.is_floating_point():
            return moved
        # -100, the ignored class, is 156 in a byte
        return moved.to(torch.int64)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that argmax over the outputs can be compared with the targets; their
        values are not read.

        Raises:
            DataError: the model returns no tensor, there is one output per example, or
                the targets are not class numbers.
        """
        self._refuse_no_tensor(outputs)
        shape = tuple(outputs.shape)
        # argmax over one output is class 0 for every example: a silent accuracy
        if outputs.ndim < 2 or shape[1] < 2:
            raise DataError(
                f"the model gives one output per example, {shape}, and task {self.name}"
                " takes the argmax over the outputs of the classes. For yes or no from"
                " one logit use task=binary (TorchClient(task=BINARY)), for a number"
                " task=regression (REGRESSION); or give the model an output for each"
                " class."
            )
        without_classes = (shape[0], *shape[2:])
        if targets.is_floating_point() or tuple(targets.shape) != without_classes:
            raise DataError(
                f"labels are {targets.dtype} of shape {tuple(targets.shape)} for"
                f" outputs of shape {shape}; class numbers needed, int64"
                f" {without_classes}."
            )

    def _refuse_no_tensor(self, outputs: Any) -> None:
        if not isinstance(outputs, Tensor):
            keys = ""
            if isinstance(outputs, Mapping):  # as models of transformers return it
                keys = f" of {', '.join(map(str, outputs))}"
            raise DataError(
                f"the model returns a {type(outputs).__name__}{keys}; task {self.name}"
                " needs one tensor. Wrap it so that it returns the logits alone."
            )


class _ColumnTask(Task):
    """A task with one output for each target, in columns; NaN = unknown: such a target
    neither trains nor counts.
    """

    def counting(self, targets: Tensor) -> Tensor:
        """Return which targets are known."""
        return ~targets.isnan()

    @staticmethod
    def _columns(values: Tensor) -> Tensor:
        """Return (N, columns) in float64."""
        return values.double().reshape(len(values), -1)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that there is one output for each target; values are not read.

        Raises:
            DataError: they have other shapes, the outputs are integers, or the model
                returns no tensor.
        """
        self._refuse_no_tensor(outputs)
        shapes = [tuple(tensor.shape) for tensor in (outputs, targets)]
        in_columns = all(len(shape) in (1, 2) for shape in shapes)
        same_rows = in_columns and shapes[0][0] == shapes[1][0]
        # (B,) is one column, on either side
        widths = [shape[1] if len(shape) == 2 else 1 for shape in shapes]
        fits = same_rows and widths[0] == widths[1] and self._takes(widths[0])
        if not fits or not outputs.is_floating_point():
            raise DataError(
                f"labels are {targets.dtype} of shape {shapes[1]} for {outputs.dtype}"
                f" outputs of shape {shapes[0]}; task {self.name} needs {self._needs}."
            )

    def _takes(self, columns: int) -> bool:
        return True

    @property
    def _needs(self) -> str:
        return (
            "one number for each target, both (B, columns), or (B,) for one column; NaN"
            " = unknown"
        )


@dataclass(frozen=True)
class LabelTask(_ColumnTask):
    """Yes or no for each label: one logit each, decided at 0; targets are 0, 1 or NaN
    (unknown), of any dtype.

    Attributes:
        single: there is one label (binary).
    """

    single: bool = False

    @property
    def allowed(self) -> tuple[str, ...]:
        """The metrics that the task can have."""
        f1 = "f1" if self.single else "macro-f1"
        return ("accuracy", "balanced-accuracy", f1, "auroc", "auprc")

    def outputs(self, num_classes: int) -> int:
        """Return 1 for one label, else the number of labels."""
        return 1 if self.single else num_classes

    def probabilities(self) -> nn.Module:
        """Return the sigmoid: each label has a probability of its own."""
        return nn.Sigmoid()

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return how many known labels are decided rightly at logit 0."""
        targets = targets.view_as(outputs)
        right = (outputs > 0) == (targets > 0)
        return (right & ~targets.isnan()).sum()

    def unusable(self, targets: Tensor) -> Tensor | None:
        """Return how many labels are neither 0 nor 1 nor unknown."""
        return ((targets != 0) & (targets != 1) & ~targets.isnan()).sum()

    def refuse(self, unusable: int) -> None:
        """Raise DataError if there are unusable labels."""
        if unusable:
            raise DataError(
                f"{unusable} labels are neither 0 nor 1, and task {self.name} needs 0 ="
                " no, 1 = yes (NaN = unknown). Rewrite them, or use"
                " task=classification (CLASSIFICATION) for numbers of classes."
            )

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the ``metrics_of_all_outputs`` for all outputs and targets of a test."""
        return of_labels(
            self.metrics_of_all_outputs, self._columns(outputs), self._columns(targets)
        )

    def _takes(self, columns: int) -> bool:
        return columns == 1 or not self.single

    @property
    def _needs(self) -> str:
        if self.single:
            return (
                "one logit and one label of 0 or 1 per example, each (B, 1) or (B,)."
                " For several classes use task=classification (CLASSIFICATION), for"
                " several labels task=multi-label (MULTI_LABEL)"
            )
        return "one logit for each label of 0, 1 or NaN (unknown), both (B, labels)"


@dataclass(frozen=True)
class RegressionTask(_ColumnTask):
    """One number for each target, or several in columns; targets are numbers or NaN
    (unknown), of any dtype.
    """

    @property
    def allowed(self) -> tuple[str, ...]:
        """The metrics that the task can have."""
        return ("mae", "rmse", "r2")

    def outputs(self, num_classes: int) -> int:
        """Return the number of target columns."""
        return max(num_classes, 1)

    def probabilities(self) -> nn.Module:
        """Return the identity."""
        return nn.Identity()

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 0: a number is not right or wrong."""
        return targets.new_zeros((), dtype=torch.int64)

    def unusable(self, targets: Tensor) -> Tensor | None:
        """Return how many targets are infinite."""
        return targets.isinf().sum()

    def refuse(self, unusable: int) -> None:
        """Raise DataError if there are unusable targets."""
        if unusable:
            raise DataError(
                f"{unusable} targets are infinite: give numbers, or NaN where the"
                " target is unknown."
            )

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the ``metrics_of_all_outputs`` for all outputs and targets of a test."""
        return of_numbers(
            self.metrics_of_all_outputs, self._columns(outputs), self._columns(targets)
        )


CLASSIFICATION = Task()
SEGMENTATION = Task(
    "segmentation", pixel_cross_entropy, IGNORED_PIXEL, "miou", 8, by_pixel=True
)
BINARY = LabelTask(
    "binary",
    label_cross_entropy,
    metrics=("accuracy", "balanced-accuracy", "f1", "auroc", "auprc"),
    single=True,
)
MULTI_LABEL = LabelTask(
    "multi-label",
    label_cross_entropy,
    score="auroc",
    metrics=("accuracy", "macro-f1", "auroc", "auprc"),
)
REGRESSION = RegressionTask(
    "regression", squared_error, score="mae", metrics=("mae", "r2")
)
TASKS = {
    task.name: task
    for task in (CLASSIFICATION, BINARY, MULTI_LABEL, REGRESSION, SEGMENTATION)
}
"""The tasks of the config key ``task``."""
METRICS = tuple(dict.fromkeys(name for task in TASKS.values() for name in task.allowed))
"""The metrics of all tasks."""


def quantity_of(metric: str) -> str:
    """Return what a metric measures, without where: "accuracy" of
    "test-recalibrated-accuracy".
    """
    names = [name for name in (*METRICS, _LOSS) if f"-{metric}".endswith(f"-{name}")]
    # "balanced-accuracy" ends as "accuracy" does
    return max(names, key=len, default=metric)


def in_percent(metric: str) -> bool:
    """Return whether a metric, such as ``test-accuracy``, is a share, which tables show
    in percent.
    """
    if metric.endswith("-clients"):  # their number
        return False
    return not {*metric.split("-")}.intersection(_NO_SHARES)


def higher_is_better(metric: str) -> bool:
    """Return whether more of a metric, such as ``test-accuracy``, is better; not so for
    losses and errors.
    """
    return not {*metric.split("-")}.intersection(_LOWER_IS_BETTER)

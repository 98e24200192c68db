"""The learning tasks with their targets, losses and metrics. Torch only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
    "Pairs",
    "RegressionTask",
    "Score",
    "Task",
    "higher_is_better",
    "in_percent",
    "quantity_of",
]

Pairs = Iterable[tuple[Any, Any]]
"""The inputs and the targets of each batch; each pass reads them anew."""

# Metrics that ``evaluate`` counts batch by batch.
_COUNTED = ("accuracy", "miou", "dice")
_NO_SHARES = ("mae", "rmse", "r2", "loss")
_LOWER_IS_BETTER = ("loss", "mae", "rmse")
_LOSS = "loss"  # every test has this metric
_OTHER = "Outputs and targets of any other form need an OwnTask, with your own loss."


def refuse_no_tensor(outputs: object, what: str, remedy: str = "") -> None:
    """Raise DataError if the outputs of a model are not a tensor, as ``what`` needs."""
    if not isinstance(outputs, Tensor):
        raise DataError(
            f"the model returns a {type(outputs).__name__}, but {what} needs a tensor:"
            " let its forward return only the outputs, such as result.logits or"
            f" result['out']. {remedy}".rstrip()
        )


@dataclass(frozen=True)
class Task:
    """A learning task with its loss, its counted targets and its metrics.

    Targets of this class are class numbers, one for each example or pixel; subclasses
    have other targets.

    Attributes:
        name: the name in messages.
        loss: returns the mean loss of a batch, from outputs (B, classes, ...) and
            targets (B, ...). If there are class weights, the loss of a test depends on
            the distribution of its examples over batches, because the sum over each
            batch is divided by the weights of this batch.
        ignore: targets with this value neither train nor count.
        score: the main metric of a run: one of ``metrics``, or the loss.
        test_batch: examples per test batch. It limits the memory, and it changes the
            last bits of sums.
        plain_test_batch: examples per test batch if the BatchNorm layers have running
            statistics, so that only the last bits depend on it. 0 selects
            ``test_batch``.
        metrics: names of the metrics of every test, in order. () selects the accuracy
            and the score.
        by_pixel: whether each pixel has a target.
        training_loss: the loss of training steps, such as a loss with class weights.
            None selects ``loss``, the loss of tests.

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

    in_columns: ClassVar[bool] = False
    """Whether each target has one output, both in columns."""

    def __post_init__(self) -> None:
        """Check the metrics."""
        # Take each name once, because the accuracy may be the score.
        names = self.metrics or tuple(dict.fromkeys(("accuracy", self.score)))
        object.__setattr__(self, "metrics", names)
        self._refuse("metrics", names, self.allowed)

    def _refuse(self, key: str, names: Sequence[str], allowed: Sequence[str]) -> None:
        wrong = [name for name in names if name not in allowed]
        if wrong:
            raise ConfigError(
                f"{key}={', '.join(wrong)} is not allowed for task {self.name}. Use"
                f" {', '.join(allowed)}",
                code="metric-of-task",
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
        """The metrics that are computed from all outputs and targets of a test."""
        return [name for name in self.metrics if name not in _COUNTED]

    def measuring(self, names: Sequence[str]) -> Task:
        """Return this task with further metrics.

        Raises:
            ConfigError: the task does not have them.
        """
        metrics = tuple(dict.fromkeys((*self.metrics, *names)))
        return dataclasses.replace(self, metrics=metrics)

    def scored_by(self, metric: str) -> Task:
        """Return this task with another main metric.

        The metric is one of ``allowed``, or "loss".

        Raises:
            ConfigError: the task does not have it; the message lists the allowed names.
        """
        self._refuse("metrics", [metric], [*self.allowed, _LOSS])
        task = self if metric == _LOSS else self.measuring([metric])
        return dataclasses.replace(task, score=metric)

    def outputs(self, num_classes: int) -> int:
        """Return the number of outputs of a model for this task.

        ``num_classes`` is the number of classes, labels or target columns in the data.
        """
        return num_classes

    def probabilities(self) -> nn.Module:
        """Return the layer that converts outputs (N, classes, ...) to probabilities.

        For numbers the layer changes nothing.
        """
        return nn.Softmax(1)

    def class_probabilities(self, outputs: Tensor) -> Tensor | None:
        """Return the probabilities (N, K), float64, of K classes of each example.

        The result is None if the task or the outputs do not have one class for each
        example.
        """
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            return None
        return outputs.double().softmax(1)

    def run(self, model: nn.Module, inputs: Any, targets: Any) -> Any:
        """Make the passes of a training step, in the present mode of the model.

        The targets are as the data have them, and may be missing.
        """
        return model(inputs)

    def step(
        self, model: nn.Module, inputs: Any, targets: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss of a training batch, and the outputs.

        The outputs are None if they have no metrics.

        Raises:
            DataError: the outputs or the targets do not fit the task.
        """
        outputs = model(inputs)
        self.check(outputs, targets)
        return (self.training_loss or self.loss)(outputs, targets), outputs

    def tested(
        self, model: nn.Module, inputs: Any, targets: Any, number: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss of a test batch, and the outputs, as ``step``.

        ``number`` is the number of the batch in the test.
        """
        outputs = model(inputs)
        self.check(outputs, targets)
        return self.loss(outputs, targets), outputs

    def measured(self, model: nn.Module, batches: Pairs) -> dict[str, float]:
        """Return the metrics that a user computes in a test."""
        return {}

    def refuse_other_names(self, metrics: Mapping[str, float]) -> None:
        """Raise ConfigError if a user's test has other metrics than before."""

    def counting(self, targets: Tensor) -> Tensor:
        """Return a mask of the targets that count."""
        return targets != self.ignore

    def counted(self, targets: Tensor) -> Tensor:
        """Return the number of counted targets (images or pixels)."""
        return self.counting(targets).sum()

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a mask of the correct targets among those that count.

        It has none if the task has no accuracy.
        """
        return outputs.argmax(1) == targets

    def unusable(self, targets: Tensor) -> Tensor | None:
        """Return the number of targets with values that do not exist in the task.

        The result is None if the loss refuses such targets.
        """
        return None

    def refuse(self, unusable: int) -> None:
        """Raise DataError if there are unusable targets."""

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the ``metrics_of_all_outputs`` of a test.

        ``outputs`` are all outputs (N, ...), ``targets`` all targets (N, ...).
        """
        kept = targets != self.ignore
        return of_classes(
            self.metrics_of_all_outputs, outputs[kept].double(), targets[kept]
        )

    @staticmethod
    def on_device(targets: Any, device: torch.device) -> Tensor:
        """Return a batch's targets on the device, integers as int64."""
        if not isinstance(targets, Tensor):
            raise DataError(
                f"the labels of a batch are {targets!r:.50}, but they must be a tensor:"
                f" give each class a number in the data set. {_OTHER}"
            )
        moved: Tensor = targets.to(device)
        if moved.is_floating_point():
            return moved
        # Convert the numbers, because -100, the ignored class, is 156 in a byte.
        return moved.to(torch.int64)

    def _refuse_shapes(self, outputs: Any, targets: Tensor) -> None:
        """Raise DataError unless the outputs are a tensor with a row per example."""
        refuse_no_tensor(outputs, f"task {self.name}", _OTHER)
        if tuple(outputs.shape[:1]) != (len(targets),):
            raise DataError(
                f"the model returns outputs of shape {tuple(outputs.shape)} for a batch"
                f" of {len(targets)}, but the first axis must be the batch. If forward"
                " calls squeeze(), which also removes the axis of a batch of one example,"
                f" call squeeze(1) or flatten(1). {_OTHER}"
            )

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that argmax over the outputs can be compared with the targets.

        The values of the targets are not read.

        Raises:
            DataError: the model does not return a tensor, it gives one output per
                example, or the targets are not class numbers.
        """
        self._refuse_shapes(outputs, targets)
        shape = tuple(outputs.shape)
        # Refuse a single output, because its argmax is always class 0 and the accuracy
        # would be meaningless.
        if outputs.ndim < 2 or shape[1] < 2:
            raise DataError(
                f"the model gives one output per example, {shape}, but task {self.name}"
                " takes the argmax over the outputs of the classes. For yes or no from"
                " one logit use task=binary (TorchClient(task=BINARY)). For a number"
                " use task=regression (REGRESSION). Otherwise give the model an output"
                " for each class."
            )
        without_classes = (shape[0], *shape[2:])
        if targets.is_floating_point() or tuple(targets.shape) != without_classes:
            raise DataError(
                f"the labels are {targets.dtype} of shape {tuple(targets.shape)} for"
                f" outputs of shape {shape}; they must be class numbers, int64 of shape"
                f" {without_classes}. {_OTHER}"
            )


class _ColumnTask(Task):
    """A task with one output for each target, in columns.

    Unknown targets are NaN; they neither train nor count.
    """

    in_columns = True
    # computes metrics from their names, the outputs and the targets, in columns
    _metrics: ClassVar[Callable[..., dict[str, float]]]

    def class_probabilities(self, outputs: Tensor) -> Tensor | None:
        """Return None, because targets in columns are not classes of an example."""
        return None

    def counting(self, targets: Tensor) -> Tensor:
        """Return a mask of the known targets."""
        return ~targets.isnan()

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the ``metrics_of_all_outputs`` of a test."""
        both = (outputs, targets)
        columns = [values.double().reshape(len(values), -1) for values in both]
        return self._metrics(self.metrics_of_all_outputs, *columns)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that each target has an output, without reading values.

        Raises:
            DataError: the shapes differ, the outputs are integers, or the model does
                not return a tensor.
        """
        self._refuse_shapes(outputs, targets)
        shapes = [tuple(tensor.shape) for tensor in (outputs, targets)]
        in_columns = all(len(shape) in (1, 2) for shape in shapes)
        same_rows = in_columns and shapes[0][0] == shapes[1][0]
        # shape (B,) is one column, for outputs and for targets
        widths = [shape[1] if len(shape) == 2 else 1 for shape in shapes]
        fits = same_rows and widths[0] == widths[1] and self._takes(widths[0])
        if not fits or not outputs.is_floating_point():
            raise DataError(
                f"the labels are {targets.dtype} of shape {shapes[1]} for"
                f" {outputs.dtype} outputs of shape {shapes[0]}; task {self.name} needs"
                f" {self._needs}. {_OTHER}"
            )

    def _takes(self, columns: int) -> bool:
        return True

    @property
    def _needs(self) -> str:
        return (
            "one number for each target, both (B, columns), or (B,) for one column"
            " (unknown targets are NaN)"
        )


@dataclass(frozen=True)
class LabelTask(_ColumnTask):
    """Yes or no for each label, decided at logit 0.

    Each label has one logit. Targets are 0, 1 or NaN (unknown), of any dtype.

    Attributes:
        single: whether there is only one label (binary).
    """

    _metrics = staticmethod(of_labels)

    single: bool = False

    @property
    def allowed(self) -> tuple[str, ...]:
        """The metrics that the task can have."""
        f1 = "f1" if self.single else "macro-f1"
        return ("accuracy", "balanced-accuracy", f1, "auroc", "auprc")

    def outputs(self, num_classes: int) -> int:
        """Return 1 for one label, else the number of labels."""
        return 1 if self.single else num_classes

    def class_probabilities(self, outputs: Tensor) -> Tensor | None:
        """Return the probabilities of no and yes (N, 2) if there is one label."""
        if not self.single:
            return None
        positive = outputs.double().reshape(-1, 1).sigmoid()
        return torch.cat([1 - positive, positive], 1)

    def probabilities(self) -> nn.Module:
        """Return the sigmoid, because each label has its own probability."""
        return nn.Sigmoid()

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a mask of the known labels that are decided rightly at logit 0."""
        targets = targets.view_as(outputs)
        return ((outputs > 0) == (targets > 0)) & ~targets.isnan()

    def unusable(self, targets: Tensor) -> Tensor | None:
        """Return how many labels are neither 0 nor 1 nor unknown."""
        return ((targets != 0) & (targets != 1) & ~targets.isnan()).sum()

    def refuse(self, unusable: int) -> None:
        """Raise DataError if there are unusable labels."""
        if unusable:
            raise DataError(
                f"{unusable} labels are neither 0 nor 1. Task {self.name} requires 0"
                " for no, 1 for yes and NaN for unknown. Rewrite the labels, or use"
                " task=classification (CLASSIFICATION) for class numbers."
            )

    def _takes(self, columns: int) -> bool:
        return columns == 1 or not self.single

    @property
    def _needs(self) -> str:
        if self.single:
            return (
                "one logit and one label of 0 or 1 per example, each (B, 1) or (B,)."
                " For several classes use task=classification (CLASSIFICATION). For"
                " several labels use task=multi-label (MULTI_LABEL)"
            )
        return "one logit for each label of 0, 1 or NaN (unknown), both (B, labels)"


@dataclass(frozen=True)
class RegressionTask(_ColumnTask):
    """One number for each target, or several numbers in columns.

    Targets are numbers or NaN (unknown), of any dtype.
    """

    _metrics = staticmethod(of_numbers)

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

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a mask without entries, because a number is not right or wrong."""
        return torch.zeros_like(targets, dtype=torch.bool)

    def unusable(self, targets: Tensor) -> Tensor | None:
        """Return how many targets are infinite."""
        return targets.isinf().sum()

    def refuse(self, unusable: int) -> None:
        """Raise DataError if there are unusable targets."""
        if unusable:
            raise DataError(
                f"{unusable} targets are infinite. Give finite numbers, or NaN for an"
                " unknown target."
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


class Score(str):
    """The name of a user's metric, with the facts for tables and rankings.

    Attributes:
        higher_is_better: whether a higher value is better.
        share: whether the values are shares, which tables show in percent.
    """

    higher_is_better: bool
    share: bool

    def __new__(cls, name: str, higher_is_better: bool, share: bool) -> Score:
        """Return the name of a metric, with these facts."""
        score = super().__new__(cls, name)
        score.higher_is_better, score.share = higher_is_better, share
        return score

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return the arguments for a copy."""
        return str(self), self.higher_is_better, self.share

    @classmethod
    def after(cls, prefix: str, metric: str) -> str:
        """Return ``prefix-metric``, with the facts of a user's metric."""
        key = f"{prefix}-{metric}"
        if not isinstance(metric, Score):
            return key
        return cls(key, metric.higher_is_better, metric.share)


def quantity_of(metric: str) -> str:
    """Return the quantity that a metric measures, without the name of the data.

    For example, "test-recalibrated-accuracy" measures "accuracy".
    """
    if isinstance(metric, Score):
        return metric
    known = (*METRICS, _LOSS)
    names = [name for name in known if f"-{metric}".endswith(f"-{name}")]
    # Take the longest name, because "balanced-accuracy" also ends in "accuracy".
    return max(names, key=len, default=metric)


def in_percent(metric: str) -> bool:
    """Return whether tables show a metric, such as ``test-accuracy``, in percent.

    These are the metrics that are shares.
    """
    if isinstance(metric, Score):
        return metric.share
    if metric.endswith("-clients"):  # this metric is a number of clients
        return False
    return not {*metric.split("-")}.intersection(_NO_SHARES)


def higher_is_better(metric: str) -> bool:
    """Return whether a higher value of a metric is better.

    The name of a metric may begin with its data, such as ``test-accuracy``. Losses and
    errors are better if they are lower.
    """
    if isinstance(metric, Score):
        return metric.higher_is_better
    return not {*metric.split("-")}.intersection(_LOWER_IS_BETTER)

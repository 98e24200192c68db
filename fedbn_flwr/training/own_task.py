"""A user's task: the loss of a batch, and the metrics of a test. Torch only.

The user's functions call the model themselves, so inputs and targets may have any
structure. Example::

    >>> import torch
    >>> from fedbn_flwr.training import OwnTask
    >>> def loss(model, inputs, targets):
    ...     return (model(inputs) - targets).square().mean()
    >>> def test(model, batches):
    ...     errors = [(model(x) - y).abs().flatten() for x, y in batches]
    ...     return {"median-error": torch.cat(errors).median()}
    >>> score = {"score": "median-error", "higher_is_better": False}
    >>> OwnTask("forecast", loss=loss, test=test, **score).score
    'median-error'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.training.batches import device_of, map_inputs
from fedbn_flwr.training.freezing import in_mode, layers_of
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.tasks import METRICS, OWN_SCORES, TASKS, Pairs, Task

__all__ = ["OwnTask"]

LossOfBatch = Callable[[nn.Module, Any, Any], Tensor]
"""Returns the mean loss of a batch from the model, the inputs and the targets."""
TestOfModel = Callable[[nn.Module, Pairs], Mapping[str, Any]]
"""Returns metrics by name from the model and all batches of a test set."""


@dataclass(frozen=True, kw_only=True)
class OwnTask(Task):
    """A user's task, made of two functions.

    Attributes:
        name: the name in messages.
        loss: ``loss(model, inputs, targets)`` calls the model, and returns the mean loss
            of the batch, a tensor with one number. Training steps use it in train mode,
            tests in eval mode without gradients.
        training_loss: a function like ``loss`` for training steps; None selects
            ``loss``.
        test: ``test(model, batches)`` returns metrics by name, such as ``{"c-index":
            0.71}``, in eval mode without gradients. ``batches`` yields (inputs, targets)
            of all batches of a test set on the device of the model. NaN is a metric
            that the test set does not define. Without it, the loss is the only metric.
        score: the main metric: one of the metrics of ``test``, or the loss.
        higher_is_better: whether a higher score is better. It is needed if the score is
            not the loss.
        test_batch: examples per test batch.
        loss_in_train_mode: whether the model has a loss only in train mode, such as a
            detector of torchvision. In the pass for the loss of a test, the modules
            with children are then in train mode; the layers, such as BatchNorm and
            dropout, are in eval mode.

    Raises:
        ConfigError: the name is the name of another task, or the score lacks ``test`` or
            its direction.
    """

    loss: LossOfBatch = field()  # type: ignore[assignment]
    training_loss: LossOfBatch | None = None  # type: ignore[assignment]
    test: TestOfModel | None = None
    score: str = "loss"
    higher_is_better: bool = cast(bool, None)
    loss_in_train_mode: bool = False
    # These have no meaning here.
    ignore: int = field(init=False, default=-100)
    by_pixel: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Check the name and the score, and note the direction of the score."""
        if self.name in TASKS:
            raise ConfigError(
                f"an OwnTask needs a name of its own, but {self.name!r} is a task of the"
                " package: OwnTask('survival', loss=...)"
            )
        is_loss = self.score == "loss"
        if not is_loss and (self.test is None or self.higher_is_better is None):
            raise ConfigError(
                f"task {self.name}: score={self.score!r} needs test=, the function that"
                " returns this metric, and higher_is_better=True or False"
            )
        better = bool(self.higher_is_better) and not is_loss
        object.__setattr__(self, "higher_is_better", better)
        object.__setattr__(self, "metrics", () if is_loss else (self.score,))
        if self.score not in ("loss", *METRICS):
            OWN_SCORES[self.score] = better

    @property
    def allowed(self) -> tuple[str, ...]:
        """The metrics that are known before a test."""
        return self.metrics

    def class_probabilities(self, outputs: Any) -> None:
        """Return None, because the outputs may have any meaning."""

    def run(self, model: nn.Module, inputs: Any, targets: Any) -> Any:
        """Make the passes of a training step, in the present mode of the model."""
        targets = self.on_device(targets, device_of(model))
        return (self.training_loss or self.loss)(model, inputs, targets)

    def step(
        self, model: nn.Module, inputs: Any, targets: Any, *, in_test: bool = False
    ) -> tuple[Tensor, None]:
        """Return the mean loss of a batch.

        Raises:
            DataError: the loss is not a tensor with one number.
            ConfigError: the loss does not depend on the parameters of the model, or the
                model may have a loss only in train mode.
        """
        if not in_test:
            return self._one_number(self.run(model, inputs, targets)), None
        try:
            return self._one_number(self.loss(model, inputs, targets)), None
        except (AttributeError, TypeError, AssertionError, LookupError) as error:
            raise ConfigError(
                f"the loss of task {self.name} failed in a test, where the model is in"
                f" eval mode ({type(error).__name__}). If the model has a loss only in"
                " train mode, pass loss_in_train_mode=True"
            ) from error

    def _one_number(self, loss: Any) -> Tensor:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else None
        if shape is None or math.prod(shape) != 1:
            raise DataError(
                f"the loss of task {self.name} is a {type(loss).__name__} of shape"
                f" {shape}, but it must be a tensor with one number, the mean of the"
                " batch"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ConfigError(
                f"the loss of task {self.name} has no gradient: compute it with the"
                " model that is its first argument, without .item(), .detach() or"
                " torch.no_grad()"
            )
        return cast(Tensor, loss).reshape(())

    @staticmethod
    def on_device(targets: Any, device: torch.device) -> Any:
        """Return a batch's targets on the device; their dtypes do not change."""
        return map_inputs(lambda part: part.to(device), targets)

    def counted(self, targets: Any) -> Tensor:
        """Return 1, because every batch counts."""
        return torch.ones(())

    @contextmanager
    def modes_of_loss(self, model: nn.Module) -> Iterator[None]:
        """Put a model in eval mode into the modes of the loss, with equal draws."""
        with in_mode(model, False), seeded(0):
            if self.loss_in_train_mode:
                for module in model.modules():
                    module.training = any(True for _ in module.children())
                for layer in layers_of(model).values():
                    layer.eval()
            yield

    def measured(self, model: nn.Module, batches: Pairs) -> dict[str, float]:
        """Return the metrics of a test.

        Raises:
            ConfigError: ``test`` does not return numbers by name, the score is missing,
                or a metric has the name "loss".
        """
        if self.test is None:
            return {}
        with seeded(0):  # every test has the same draws
            returned: Any = self.test(model, batches)
        try:
            metrics = {str(name): float(value) for name, value in returned.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"test= of task {self.name} returned a {type(returned).__name__}, but it"
                " must return single numbers by name, such as {'c-index': 0.71}"
            ) from error
        if "loss" in metrics or self.score not in ("loss", *metrics):
            raise ConfigError(
                f"test= of task {self.name} returned {', '.join(metrics) or 'nothing'}."
                f" It must return its score, {self.score!r}, and must not return 'loss',"
                " the mean of loss="
            )
        return metrics

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

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError, FedBNError, described
from fedbn_flwr.training.batches import device_of, map_inputs
from fedbn_flwr.training.freezing import in_mode, layers_of
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.run_memory import kept_for_run
from fedbn_flwr.training.single_examples import raised_in
from fedbn_flwr.training.tasks import TASKS, Pairs, Score, Task

__all__ = ["OwnTask"]

# The loss and the sizes, which weigh the sites: names of every test's reply.
_OF_EVERY_TEST = ("loss", "num-examples", "examples-tested")

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
            of all batches of a test set on the device of the model; each pass over it
            after the first reads the data again. NaN is a metric that the test set does
            not define. Without it, the loss is the only metric.
        score: the main metric: one of the metrics of ``test``, or the loss.
        higher_is_better: whether a higher score is better. It is needed if the score is
            not the loss.
        share: whether the score is a share from 0 to 1, which tables show in percent.
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
    share: bool = False
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
        score = Score(self.score, better, self.share and not is_loss)
        object.__setattr__(self, "score", score)
        object.__setattr__(self, "metrics", () if is_loss else (score,))

    @property
    def allowed(self) -> tuple[str, ...]:
        """The metrics that are known before a test."""
        return self.metrics

    def measuring(self, names: Sequence[str]) -> Task:
        """Return this task, because ``test`` determines the metrics.

        Raises:
            ConfigError: a name is not the score.
        """
        self._refuse("metrics", names, self.allowed)
        return self

    def class_probabilities(self, outputs: Any) -> None:
        """Return None, because the outputs may have any meaning."""

    def run(self, model: nn.Module, inputs: Any, targets: Any) -> Any:
        """Make the passes of a training step, in the present mode of the model."""
        targets = self.on_device(targets, device_of(model))
        return (self.training_loss or self.loss)(model, inputs, targets)

    def step(self, model: nn.Module, inputs: Any, targets: Any) -> tuple[Tensor, None]:
        """Return the mean loss of a training batch.

        Raises:
            ConfigError: the loss raised an exception, is not a tensor with one number,
                or does not depend on the parameters of the model.
        """
        with self._naming("loss", model):
            return self._one_number(self.run(model, inputs, targets)), None

    def tested(
        self, model: nn.Module, inputs: Any, targets: Any, number: int
    ) -> tuple[Tensor, None]:
        """Return the mean loss of a test batch, with the draws of its number.

        The loss gets a copy, because ``test`` gets the same batch afterwards.

        Raises:
            ConfigError: the loss raised an exception, because the model may have a loss
                only in train mode; or the loss is not a tensor with one number.
        """
        if self.test:
            inputs, targets = map_inputs(copy.deepcopy, (inputs, targets))
        with in_mode(model, False), seeded(number), self._naming("loss", model):
            if self.loss_in_train_mode:
                for module in model.modules():
                    module.training = any(True for _ in module.children())
                for layer in layers_of(model).values():
                    layer.eval()
            return self._one_number(self.loss(model, inputs, targets)), None

    @contextmanager
    def _naming(self, function: str, model: nn.Module) -> Iterator[None]:
        """Name the user's function in an exception of the block."""
        try:
            yield
        except FedBNError:
            raise
        except Exception as error:  # the user's code may raise anything
            if isinstance(error, ValueError) and raised_in(error, model):
                raise
            hint = self._call_hint(function)
            in_eval = function == "loss" and not torch.is_grad_enabled()
            if in_eval and not hint and not self.loss_in_train_mode:
                hint = (
                    ". In a test the model is in eval mode: if it has a loss only in"
                    " train mode, pass loss_in_train_mode=True"
                )
            raise ConfigError(
                f"{function}= of task {self.name} raised {described(error)}{hint}"
            ) from error

    def _call_hint(self, function: str) -> str:
        """Return the arguments of a call that the user's function cannot take, or ""."""
        called: Any = self.test
        arguments = ["model", "batches"]
        if function == "loss":
            trains = torch.is_grad_enabled()
            called = (trains and self.training_loss) or self.loss
            arguments = ["model", "inputs", "targets"]
        try:
            inspect.signature(getattr(called, "forward", called)).bind(*arguments)
        except TypeError:
            return f". It is called with ({', '.join(arguments)})"
        except ValueError:  # a builtin function without a signature
            pass
        return ""

    def _one_number(self, loss: Any) -> Tensor:
        is_tensor = isinstance(loss, Tensor) and not loss.is_complex()
        if not is_tensor or loss.numel() != 1:
            of = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise ConfigError(
                f"the loss of task {self.name} is a {type(loss).__name__}{of}, but it"
                " must be a tensor with one real number, the mean of the batch"
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

    def measured(self, model: nn.Module, batches: Pairs) -> dict[str, float]:
        """Return the metrics of a test.

        Raises:
            ConfigError: ``test`` raised an exception, it does not return numbers by
                name, the score is missing, or a metric has a name that every test has.
        """
        if self.test is None:
            return {}
        # every test has the same draws
        with seeded(0), self._naming("test", model):
            returned: Any = self.test(model, batches)
        metrics: dict[str, float] = {}
        wrong = "" if isinstance(returned, Mapping) else type(returned).__name__
        for name, value in () if wrong else returned.items():
            if getattr(value, "requires_grad", False):
                wrong = f"a tensor with a gradient as {name!r}"
                break
            try:
                metrics[str(name)] = float(value)
            except (TypeError, ValueError, RuntimeError, OverflowError):
                wrong = f"{value!r:.40} as {name!r}"
        if wrong:
            raise ConfigError(
                f"test= of task {self.name} returned {wrong}, but it must return single"
                " numbers by name, such as {'c-index': 0.71}"
            )
        taken = metrics.keys() & _OF_EVERY_TEST
        if taken or self.score not in ("loss", *metrics):
            raise ConfigError(
                f"test= of task {self.name} returned {', '.join(metrics) or 'nothing'}."
                f" It must return its score, {self.score!r}, and must not return"
                f" {', '.join(_OF_EVERY_TEST)}, which every test has"
            )
        return metrics

    def refuse_other_names(self, metrics: Mapping[str, float]) -> None:
        """Compare the names of a test's metrics with those of the run's first test.

        Raises:
            ConfigError: the names differ.
        """
        known: dict[str, list[str]] = kept_for_run("names of metrics", dict)
        first = known.setdefault(self.name, sorted(metrics))
        if first != sorted(metrics):
            raise ConfigError(
                f"test= of task {self.name} returned {', '.join(metrics)}, but"
                f" {', '.join(first)} in the first test of the run. Return the same names"
                " in every round and at every site, and NaN for a metric that a test set"
                " does not define"
            )

"""Local training: the only loop that trains, with the hooks that a method may use. Torch only.

Its effect on BatchNorm: layers are in train mode unless a hook puts them in eval mode, and the layers themselves update
their running statistics once per step.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import DataError, FedBNError
from fedbn_flwr.training.memory_format import device_of, inputs_for
from fedbn_flwr.training.modes import kept_modes
from fedbn_flwr.training.optimizers import make_optimizer, take_step
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.scripted import is_scripted_batchnorm
from fedbn_flwr.training.settings import LocalTraining
from fedbn_flwr.training.tasks import CLASSIFICATION, Task
from fedbn_flwr.training.wrappers import unwrap

__all__ = [
    "Batches",
    "ClientHook",
    "Entries",
    "Extras",
    "LossAndOutputs",
    "StepRule",
    "Stream",
    "TrainResult",
    "join_last",
    "refusing_layers",
    "takes_one_example",
    "train",
    "with_positions",
]

LossAndOutputs = tuple[Tensor, Tensor]  # the batch's mean loss without penalties, and the outputs, both detached
Compute = Callable[[], LossAndOutputs]
Entries = Mapping[str, Tensor]
Extras = Mapping[str, Entries]
Stream = Callable[[str], torch.Generator]


class Batches(Protocol):
    """The data interface of training and evaluation: a length, and batches by position.

    Any object with these two methods is such a data set; ``fedbn_flwr.data.Subset`` is one. ::

        class Memory:
            def __init__(self, inputs, targets):
                self.inputs, self.targets = inputs, targets

            def __len__(self):
                return len(self.inputs)

            def batch(self, positions, generator=None):
                return self.inputs[positions], self.targets[positions]
    """

    def __len__(self) -> int:
        """Return the number of examples."""

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) at the positions (int64, any order), augmented if a generator is given."""


class ClientHook:
    """The client part of a method in local training. Here every hook does nothing; a method overrides what it needs.

    Calls in a round: ``receive``, ``begin``, ``survey``, ``start``; for each step ``penalty`` and ``gradients``; then
    ``end``, ``reply``, ``keep``. Around a step ``TorchClient`` calls ``run_step``, and a user's loop calls ``around``:
    a hook that acts there overrides both. What ``keep`` returns is stored under the name of the hook's class.
    """

    def receive(self, sent: Extras, kept: Entries) -> None:
        """Take the server's extra records, and the entries that this hook kept in the last round."""

    def begin(self, model: nn.Module) -> None:
        """Prepare the model before the first step; it has the state from the server and is in train mode."""

    def survey(self, model: nn.Module, data: Batches, batch_size: int, seed: int) -> None:
        """Pass the client's data through the model, which has the weights from the server; after ``begin``.

        Args:
            model: as ``begin`` left it.
            data: the client's training data, taken without a generator, so without augmentation.
            batch_size: examples per batch; 0 = all in one.
            seed: for dropout and other random layers.
        """

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Prepare the optimizer, which has the learning rate of the round."""

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Return a term to add to the loss of a step, or None; the reported loss does not include it."""
        return None

    def gradients(self, model: nn.Module) -> None:
        """Change the gradients of a step, after their norm was clipped, before weight decay and momentum."""

    def synchronises(self, step: int) -> bool:
        """Return whether BN in step ``step`` (from 0) uses all clients' batches, so that a batch of one is enough."""
        return False

    def takes_one_value(self, layer: nn.Module) -> bool:
        """Return whether this BatchNorm layer, in train mode, can use a batch with one value per channel."""
        return False

    def run_step(self, step: int, model: nn.Module, batch_size: int, compute: Compute) -> LossAndOutputs:
        """Return ``compute()``, the forward and backward pass of a step; a hook may call it again to repeat the step.

        Every call of ``compute`` uses the same batch, but the hook must restore the model's state and the default
        generators first. An exception here ends the round's training.
        """
        return compute()

    def around(self, step: int, model: nn.Module, batch_size: int) -> AbstractContextManager[object]:
        """Return a context for the forward and backward pass of a step, for training loops of other projects."""
        return nullcontext()

    def end(self, model: nn.Module) -> dict[str, float]:
        """Undo the changes of ``begin`` to the model's settings; return metrics for the reply."""
        return {}

    def reply(self) -> Extras:
        """Return the extra records for the server, besides the model."""
        return {}

    def keep(self) -> Entries:
        """Return the entries that the client keeps until its next round."""
        return {}


class StepRule:
    """How a step draws its batch and computes its gradients: here as the settings say, in one backward pass.

    Attributes:
        may_drop: whether a batch of one example is left out if a BatchNorm would see one value per channel.
    """

    may_drop = True

    def stream(self, stream: Stream) -> Stream:
        """Return what makes the generators of a round, given that of ``train``."""
        return stream

    def batches(
        self, model: nn.Module, settings: LocalTraining, num_examples: int, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Yield the positions of each step's batch, int64 (B,); an empty batch is a step, too.

        The model is ready to train; it is not changed here.
        """
        return settings.batches(num_examples, generator)

    def compute(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        optimizer: torch.optim.Optimizer,
        hooks: Sequence[ClientHook],
        task: Task,
        amp: bool,
    ) -> LossAndOutputs:
        """Do the forward and backward pass of a step: set the gradients of the optimizer's parameters."""
        with torch.autocast(inputs.device.type, torch.bfloat16) if amp else nullcontext():
            outputs = model(inputs)
            task.check(outputs, targets)
            loss = task.loss(outputs, targets)
        total = loss
        for hook in hooks:
            if (penalty := hook.penalty(unwrap(model))) is not None:
                total = total + penalty
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        total.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), outputs.detach()


@dataclass(frozen=True)
class TrainResult:
    """The result of one round of local training.

    Attributes:
        loss: mean of the batch losses before each step over the processed examples, without penalties; that of a batch
            in which no target counts is 0. NaN if all batches are empty.
        accuracy: the share of counted targets that are predicted correctly, before each step; None for a task without
            accuracy.
        num_processed: processed examples; an example counts in each step that uses it.
        num_steps: optimizer steps.
        num_dropped: batches of one example that were left out because a BatchNorm would see one value per channel.
        metrics: metrics of the hooks.
    """

    loss: float
    accuracy: float | None
    num_processed: int
    num_steps: int
    num_dropped: int
    metrics: dict[str, float]


def train(
    model: nn.Module,
    data: Batches,
    settings: LocalTraining,
    *,
    learning_rate: float,
    stream: Stream,
    hooks: Sequence[ClientHook] = (),
    task: Task = CLASSIFICATION,
    optimizer: torch.optim.Optimizer | None = None,
    rule: StepRule | None = None,
) -> TrainResult:
    """Train ``model`` in place for one round.

    Args:
        model: on the device to train on.
        data: the client's training data.
        settings: steps, batch size, optimizer.
        learning_rate: rate of this round.
        stream: returns a CPU generator for a purpose ("survey", "batches", "augment", "dropout").
        hooks: the method's hooks.
        task: the loss, and which targets count.
        optimizer: an optimizer to continue with (the centralized reference keeps its momentum); None = a new one.
        rule: how a step draws its batch and computes its gradients; None = as the settings say.

    Raises:
        DataError: there is no data, every batch has one example and was dropped, or outputs or targets do not fit the
            task.
    """
    if len(data) == 0:
        raise DataError("no training examples: leave this client out or give it data")
    device, prepared = device_of(model), inputs_for(model)
    model.train()
    bare = unwrap(model)  # hooks see the names without a wrapper's prefix; the passes use the wrapper
    with _begun(hooks, bare):
        seed = stream("survey").initial_seed()
        for hook in hooks:
            hook.survey(bare, data, settings.batch_size, seed)
        optimizer, rule = optimizer or make_optimizer(model, settings), rule or StepRule()
        stream = rule.stream(stream)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        for hook in hooks:
            hook.start(bare, optimizer)
        augment = stream("augment")
        totals = _Totals(task)
        dropped = 0
        singletons_fit: bool | None = None
        with seeded(stream("dropout").initial_seed()):
            order = rule.batches(model, settings, len(data), stream("batches"))
            for step, (positions, (inputs, targets)) in enumerate(with_positions(data, order, augment)):
                inputs, targets = prepared(inputs), task.on_device(targets, device)
                if rule.may_drop and len(positions) == 1 and not any(hook.synchronises(step) for hook in hooks):
                    if singletons_fit is None:
                        singletons_fit = takes_one_example(model, inputs, hooks)
                    if not singletons_fit:
                        dropped += 1
                        continue
                compute = functools.partial(rule.compute, model, inputs, targets, optimizer, hooks, task, settings.amp)
                for hook in hooks:
                    compute = functools.partial(hook.run_step, step, bare, len(positions), compute)
                loss, outputs = compute()
                if settings.gradient_clip_norm:
                    nn.utils.clip_grad_norm_(bare.parameters(), settings.gradient_clip_norm)  # not HBN's alpha
                for hook in hooks:
                    hook.gradients(bare)
                take_step(optimizer)
                totals.add(loss, outputs, targets)
    metrics = {key: value for hook in hooks for key, value in hook.end(bare).items()}
    if not totals.steps:
        raise _nothing_trained(dropped, len(data), settings.batch_size)
    return totals.result(dropped, metrics)


def _nothing_trained(dropped: int, num_examples: int, batch_size: int) -> DataError:
    remedy = f"use a batch-size above 1 (it is {batch_size})"
    if num_examples == 1:
        remedy = "give this client, which has one training example, more of them, leave it out"
    return DataError(
        f"all {dropped} batches have one example, from which BatchNorm cannot compute a variance: {remedy}, or use "
        "another norm"
    )


@contextmanager
def _begun(hooks: Sequence[ClientHook], model: nn.Module) -> Iterator[None]:
    """Begin the hooks. If the block raises, end them: the model may be used again, for another round."""
    begun: list[ClientHook] = []
    try:
        for hook in hooks:
            hook.begin(model)
            begun.append(hook)
        yield
    except BaseException:
        for hook in reversed(begun):
            with suppress(Exception):  # the first error is the one to see
                hook.end(model)
        raise


@dataclass
class _Totals:
    """Sums over the steps, which are read from the device at the end only."""

    task: Task
    steps: int = 0
    losses: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    correct: list[Tensor] = field(default_factory=list)
    counted: list[Tensor] = field(default_factory=list)
    unusable: list[Tensor] = field(default_factory=list)

    def add(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Add a step's mean loss, its outputs (B, classes, ...) and its targets (B, ...)."""
        self.steps += 1
        if not len(outputs):
            return
        self.losses.append(loss)
        self.sizes.append(len(outputs))
        self.correct.append(self.task.correct(outputs, targets))
        self.counted.append(self.task.counted(targets))
        if (wrong := self.task.unusable(targets)) is not None:
            self.unusable.append(wrong)

    def result(self, dropped: int, metrics: dict[str, float]) -> TrainResult:
        """Return the result of the round.

        Raises:
            DataError: targets have values that the task does not have.
        """
        if self.unusable:
            self.task.refuse(int(torch.stack(self.unusable).sum()))
        if not self.sizes:
            return TrainResult(math.nan, None, 0, self.steps, dropped, metrics)
        counted = torch.stack(self.counted).tolist()
        total = 0.0  # not sum(), which rounds differently from Python 3.12 on
        for loss, size, targets in zip(torch.stack(self.losses).tolist(), self.sizes, counted, strict=True):
            total += loss * size if targets else 0.0  # torch's mean over no target is NaN
        processed, correct = sum(self.sizes), int(torch.stack(self.correct).sum())
        accuracy = correct / max(sum(counted), 1) if "accuracy" in self.task.metrics else None
        return TrainResult(total / processed, accuracy, processed, self.steps, dropped, metrics)


def with_positions(
    data: Batches, order: Iterable[Tensor], generator: torch.Generator | None = None
) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Yield the positions of each batch and the batch; data with a method ``batches`` may read some batches ahead."""
    if not hasattr(data, "batches"):
        for positions in order:
            yield positions, data.batch(positions, generator)
        return
    asked: deque[Tensor] = deque()

    def noted() -> Iterator[Tensor]:
        for positions in order:
            asked.append(positions)
            yield positions

    for batch in data.batches(noted(), generator):
        yield asked.popleft(), batch


def join_last(batches: Sequence[Tensor]) -> list[Tensor]:
    """Return the batches with the last one joined to the one before it; none if there is one only."""
    *others, last = batches
    return [*others[:-1], torch.cat([others[-1], last])] if others else []


def takes_one_example(model: nn.Module, inputs: Tensor, hooks: Sequence[ClientHook] = ()) -> bool:
    """Return whether a batch of one example can be trained on.

    Each training BatchNorm sees more than one value per channel in it, or a hook says that one is enough.
    """
    return not refusing_layers(model, inputs, hooks)


def refusing_layers(model: nn.Module, inputs: Tensor, hooks: Sequence[ClientHook] = ()) -> list[str]:
    """Return the BatchNorm layers that cannot use a batch of one example, by path; "" for one that is not known.

    A forward pass in eval mode, which changes nothing, counts the values: late BN2d layers may see 1x1 maps. A layer
    that it does not call or that TorchScript holds is asked by a forward pass of a copy in train mode.
    """
    layers = {
        path or "(the model itself)": module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and (module.training or module.running_mean is None)
        and not any(hook.takes_one_value(module) for hook in hooks)
    }
    counts: dict[str, int] = {}

    def count(path: str, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        value = args[0] if args else kwargs["input"]
        counts[path] = min(counts.get(path, 2), value.numel() // value.shape[1])

    handles = [
        layer.register_forward_pre_hook(functools.partial(count, path), with_kwargs=True)
        for path, layer in layers.items()
    ]
    try:
        with kept_modes(model), torch.no_grad():
            model.eval()(inputs)
        fails = False
    except FedBNError:  # a test with statistics of its inputs has its own error
        raise
    except ValueError:  # torch raises it for a BatchNorm without running statistics
        fails = True
    finally:
        for handle in handles:
            handle.remove()
    unseen = any(layer.training and path not in counts for path, layer in layers.items())
    if not fails and (unseen or any(is_scripted_batchnorm(m) and m.training for m in model.modules())):
        fails = _fails_in_train_mode(model, inputs)
    return [path for path, n in counts.items() if n < 2] or [""] * fails


def _fails_in_train_mode(model: nn.Module, inputs: Tensor) -> bool:
    with suppress(Exception), seeded(0), torch.no_grad():  # if another error comes, the training says what is wrong
        try:
            copy.deepcopy(model)(inputs)
        except (ValueError, torch.jit.Error):
            return True
    return False

"""Local training: the one loop that trains, with the hooks a method may use. Torch only.

What it does to BatchNorm: layers are in train mode unless a rule puts them in eval mode; running statistics are
updated once per step by the layers themselves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.training.randomness import private_randomness
from fedbn_flwr.training.tasks import CLASSIFICATION, LossFn, Task
from fedbn_flwr.training.wrappers import unwrap

__all__ = [
    "Batches",
    "Entries",
    "Extras",
    "LearningRate",
    "LocalTraining",
    "ClientHook",
    "Stream",
    "TrainResult",
    "as_model_input",
    "sgd",
    "takes_one_example",
    "train",
]

StepResult = tuple[Tensor, Tensor]  # the batch's mean loss without penalties, and the outputs, both detached
Compute = Callable[[], StepResult]
Entries = Mapping[str, Tensor]
Extras = Mapping[str, Entries]
Stream = Callable[[str], torch.Generator]


class Batches(Protocol):
    """What training and evaluation need of data: a length, and any batch of it by position."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of the positions (int64, any order); a generator asks for augmentation."""


@dataclass(frozen=True)
class LearningRate:
    """The learning rate over server rounds: ``initial``, times each factor once its round has passed.

    Args:
        initial: the rate of round 1.
        decay_after: round r means "from round r + 1"; the word "freeze" means "once the method has frozen BN".
        factors: one factor for each entry of ``decay_after``.
    """

    initial: float
    decay_after: tuple[int | str, ...] = ()
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check that every decay has a factor."""
        if not (math.isfinite(self.initial) and self.initial > 0):
            raise ConfigError(f"learning rate {self.initial} must be a finite number above 0")
        if len(self.decay_after) != len(self.factors):
            raise ConfigError(f"{len(self.decay_after)} decays of the learning rate but {len(self.factors)} factors")

    def at(self, server_round: int, frozen: bool = False) -> float:
        """Return the learning rate of a round (counted from 1)."""
        rate = self.initial
        for after, factor in zip(self.decay_after, self.factors, strict=True):
            if frozen if isinstance(after, str) else server_round > after:
                rate *= factor
        return rate


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Settings of one client's training in one round.

    Args:
        learning_rate: rate over rounds.
        local_steps: steps per round, each on a batch drawn with replacement (arXiv:2301.02982, 6.1); 0 = by epochs.
        local_epochs: passes over the data per round in a fresh order, the last batch possibly smaller.
        batch_size: examples per step; 0 = the whole local data set in every step.
        sgd_momentum: momentum of SGD (not of BatchNorm); the optimizer is new in each round.
        weight_decay: L2 coefficient on every trainable parameter.
        amp: bfloat16 autocast in forward passes; parameters and statistics stay in their dtype.
    """

    learning_rate: LearningRate
    local_steps: int = 0
    local_epochs: int = 1
    batch_size: int = 32
    sgd_momentum: float = 0.0
    weight_decay: float = 0.0
    amp: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for key in ("local_steps", "local_epochs", "batch_size", "sgd_momentum", "weight_decay"):
            if not getattr(self, key) >= 0:
                raise ConfigError(f"{key}={getattr(self, key)} must be at least 0")
        if not self.local_steps and not self.local_epochs:
            raise ConfigError("local_steps and local_epochs are both 0: nothing to train")

    def first_batch(self, num_examples: int) -> int:
        """Return the examples in the first step's batch."""
        return min(self.batch_size or num_examples, num_examples)

    def batches(self, num_examples: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield the positions of each step's batch."""
        size = self.batch_size or num_examples
        whole = size >= num_examples
        if self.local_steps:
            for _ in range(self.local_steps):
                drawn = torch.arange(num_examples) if whole else None
                yield torch.randint(num_examples, (size,), generator=generator) if drawn is None else drawn
            return
        for _ in range(self.local_epochs):
            order = torch.arange(num_examples) if whole else torch.randperm(num_examples, generator=generator)
            yield from torch.split(order, size)


class ClientHook:
    """A method's part inside local training. Every hook does nothing here; a method overrides what it needs."""

    def begin(self, model: nn.Module) -> None:
        """Act before the first step: the model holds the state it was sent and is in train mode."""

    def receive(self, sent: Extras, kept: Entries) -> None:
        """Take what the server sent beside the model, by record, and what this rule kept in the last round."""

    def start(self, model: nn.Module, optimizer: torch.optim.SGD) -> None:
        """Act once the optimizer is made, with the learning rate of the round."""

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Return a term to add to the loss of a step (it does not count in the reported loss), or None."""
        return None

    def gradients(self, model: nn.Module) -> None:
        """Change the gradients of a step, before weight decay and momentum."""

    def synchronises(self, step: int) -> bool:
        """Tell whether step ``step`` (from 0) sees the other clients' batches: their union decides what BN can take."""
        return False

    def run_step(self, step: int, model: nn.Module, batch_size: int, compute: Compute) -> StepResult:
        """Return ``compute()``, the forward and backward pass of a step; it may be called again for a fresh start.

        Every call of ``compute`` takes the same batch and the same random numbers; the model's state is the caller's
        to restore. What is raised here ends the round's training.
        """
        return compute()

    def around(self, step: int, model: nn.Module, batch_size: int) -> AbstractContextManager[object]:
        """Return what is entered around the forward and backward pass of a step in a loop that is not ours."""
        return nullcontext()

    def end(self, model: nn.Module) -> dict[str, float]:
        """Undo what ``begin`` changed in the model's settings; return metrics for the reply."""
        return {}

    def reply(self) -> Extras:
        """Return what goes back to the server beside the model, by record."""
        return {}

    def keep(self) -> Entries:
        """Return what stays with the client until its next round."""
        return {}


@dataclass(frozen=True)
class TrainResult:
    """What one round of local training did.

    Attributes:
        loss: mean over the examples processed of the batch losses before each step, without penalties.
        accuracy: share of the examples processed (of their pixels that count) classified right before each step.
        num_processed: examples processed (an example counts in each step that uses it).
        num_steps: optimizer steps.
        num_dropped: batches of one example left out because a BatchNorm would have seen one value per channel.
        metrics: what the rules report.
    """

    loss: float
    accuracy: float
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
    rules: Sequence[ClientHook] = (),
    task: Task = CLASSIFICATION,
    optimizer: torch.optim.SGD | None = None,
) -> TrainResult:
    """Train ``model`` in place for one round.

    Args:
        model: on the device it shall train on.
        data: the client's training data.
        settings: steps, batch size, optimizer.
        learning_rate: rate of this round.
        stream: gives a CPU generator for a purpose ("batches", "augment", "dropout").
        rules: the method's hooks.
        task: the loss, and which targets count.
        optimizer: one to go on with (the centralized reference keeps its momentum); None = a new one.

    Raises:
        DataError: there is no data, or nothing is left to train on after batches of one were dropped.
    """
    if len(data) == 0:
        raise DataError("no training examples: leave this client out or give it data")
    device = next(model.parameters()).device
    dtype = next(model.parameters()).dtype
    model.train()
    bare = unwrap(model)  # rules see the names that travel; the passes go through the wrapper
    for rule in rules:
        rule.begin(bare)
    optimizer = optimizer or sgd(model, settings)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    for rule in rules:
        rule.start(bare, optimizer)
    augment = stream("augment")
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # summed loss, correct, counted; read once at the end
    processed = steps = dropped = 0
    singletons_fit: bool | None = None
    with private_randomness(stream("dropout").initial_seed(), device) as random:
        for step, positions in enumerate(settings.batches(len(data), stream("batches"))):
            inputs, targets = data.batch(positions, augment)
            inputs, targets = as_model_input(inputs, device, dtype), targets.to(device)
            if len(positions) == 1 and not any(rule.synchronises(step) for rule in rules):
                singletons_fit = takes_one_example(model, inputs) if singletons_fit is None else singletons_fit
                if not singletons_fit:
                    dropped += 1
                    continue
            compute = _step(model, inputs, targets, optimizer, rules, task.loss, settings.amp, random)
            for rule in rules:
                compute = functools.partial(rule.run_step, step, bare, len(positions), compute)
            loss, outputs = compute()
            for rule in rules:
                rule.gradients(bare)
            optimizer.step()
            totals[0] += loss.double() * len(positions)
            totals[1] += (outputs.argmax(1) == targets).sum()
            totals[2] += task.counted(targets)
            processed += len(positions)
            steps += 1
    metrics = {key: value for rule in rules for key, value in rule.end(bare).items()}
    if not steps:
        raise DataError(
            f"all {dropped} batches have one example, from which BatchNorm cannot compute a variance. Use a "
            f"batch-size above 1 (it is {settings.batch_size}) or another norm."
        )
    loss_sum, correct, counted = totals.tolist()
    return TrainResult(loss_sum / processed, correct / max(counted, 1), processed, steps, dropped, metrics)


def _step(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    optimizer: torch.optim.SGD,
    rules: Sequence[ClientHook],
    loss_fn: LossFn,
    amp: bool,
    random: torch.Generator,
) -> Compute:
    """Return the function that does one forward and backward pass, from the same random state at every call."""
    state = random.get_state()

    def compute() -> StepResult:
        random.set_state(state)
        with torch.autocast(inputs.device.type, torch.bfloat16) if amp else nullcontext():
            outputs = model(inputs)
            loss = loss_fn(outputs, targets)
        total = loss
        for rule in rules:
            if (penalty := rule.penalty(unwrap(model))) is not None:
                total = total + penalty
        optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), outputs.detach()

    return compute


def sgd(model: nn.Module, settings: LocalTraining) -> torch.optim.SGD:
    """Return a fresh SGD optimizer over the trainable parameters (torch's weight decay: added to the gradient)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rate = settings.learning_rate.initial
    return torch.optim.SGD(parameters, rate, momentum=settings.sgd_momentum, weight_decay=settings.weight_decay)


def as_model_input(inputs: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Move a batch to the model's device and dtype; channels-last on CUDA, where convolutions are faster so."""
    inputs = inputs.to(device, dtype if inputs.is_floating_point() else None, non_blocking=True)
    if device.type == "cuda" and inputs.dim() == 4:
        return inputs.contiguous(memory_format=torch.channels_last)
    return inputs


def takes_one_example(model: nn.Module, inputs: Tensor) -> bool:
    """Tell whether a batch of one leaves every training BatchNorm more than one value per channel.

    Found out by a forward pass in eval mode, which changes nothing: a BN2d late in a network may see 1x1 maps.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)]
    counts: list[int] = []

    def count(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        counts.append(args[0].numel() // args[0].shape[1])

    handles = [layer.register_forward_pre_hook(count) for layer in layers]
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            model(inputs)
    except ValueError:  # torch's own refusal, from a BatchNorm without running statistics
        return False
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return all(n > 1 for n in counts)

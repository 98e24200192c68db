"""Local training: the one loop that trains, with the hooks a method may use. Torch only.

What it does to BatchNorm: layers are in train mode unless a hook puts them in eval mode; running statistics are
updated once per step by the layers themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import DataError
from fedbn_flwr.training.randomness import private_randomness
from fedbn_flwr.training.settings import LocalTraining
from fedbn_flwr.training.tasks import CLASSIFICATION, LossFn, Task
from fedbn_flwr.training.wrappers import unwrap

__all__ = [
    "Batches",
    "ClientHook",
    "Entries",
    "Extras",
    "LossAndOutputs",
    "Stream",
    "TrainResult",
    "as_model_input",
    "kept_modes",
    "sgd",
    "takes_one_example",
    "train",
]

LossAndOutputs = tuple[Tensor, Tensor]  # the batch's mean loss without penalties, and the outputs, both detached
Compute = Callable[[], LossAndOutputs]
Entries = Mapping[str, Tensor]
Extras = Mapping[str, Entries]
Stream = Callable[[str], torch.Generator]


class Batches(Protocol):
    """What training and evaluation need of data: a length, and any batch of it by position."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of the positions (int64, any order); a generator asks for augmentation."""


class ClientHook:
    """A method's part inside local training. Every hook does nothing here; a method overrides what it needs."""

    def begin(self, model: nn.Module) -> None:
        """Act before the first step: the model holds the state it was sent and is in train mode."""

    def receive(self, sent: Extras, kept: Entries) -> None:
        """Take what the server sent beside the model, by record, and what this hook kept in the last round."""

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

    def run_step(self, step: int, model: nn.Module, batch_size: int, compute: Compute) -> LossAndOutputs:
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
        metrics: what the hooks report.
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
    hooks: Sequence[ClientHook] = (),
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
        hooks: the method's hooks.
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
    bare = unwrap(model)  # hooks see the names that travel; the passes go through the wrapper
    for hook in hooks:
        hook.begin(bare)
    optimizer = optimizer or sgd(model, settings)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    for hook in hooks:
        hook.start(bare, optimizer)
    augment = stream("augment")
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # summed loss, correct, counted; read once at the end
    processed = steps = dropped = 0
    singletons_fit: bool | None = None
    with private_randomness(stream("dropout").initial_seed(), device) as random:
        for step, positions in enumerate(settings.batches(len(data), stream("batches"))):
            inputs, targets = data.batch(positions, augment)
            inputs, targets = as_model_input(inputs, device, dtype), targets.to(device)
            if len(positions) == 1 and not any(hook.synchronises(step) for hook in hooks):
                singletons_fit = takes_one_example(model, inputs) if singletons_fit is None else singletons_fit
                if not singletons_fit:
                    dropped += 1
                    continue
            compute = _step(model, inputs, targets, optimizer, hooks, task.loss, settings.amp, random)
            for hook in hooks:
                compute = functools.partial(hook.run_step, step, bare, len(positions), compute)
            loss, outputs = compute()
            for hook in hooks:
                hook.gradients(bare)
            optimizer.step()
            totals[0] += loss.double() * len(positions)
            totals[1] += (outputs.argmax(1) == targets).sum()
            totals[2] += task.counted(targets)
            processed += len(positions)
            steps += 1
    metrics = {key: value for hook in hooks for key, value in hook.end(bare).items()}
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
    hooks: Sequence[ClientHook],
    loss_fn: LossFn,
    amp: bool,
    random: torch.Generator,
) -> Compute:
    """Return the function that does one forward and backward pass, from the same random state at every call."""
    state = random.get_state()

    def compute() -> LossAndOutputs:
        random.set_state(state)
        with torch.autocast(inputs.device.type, torch.bfloat16) if amp else nullcontext():
            outputs = model(inputs)
            loss = loss_fn(outputs, targets)
        total = loss
        for hook in hooks:
            if (penalty := hook.penalty(unwrap(model))) is not None:
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


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Give every module its train or eval mode back at the end of the block."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def takes_one_example(model: nn.Module, inputs: Tensor) -> bool:
    """Tell whether a batch of one leaves every training BatchNorm more than one value per channel.

    Found out by a forward pass in eval mode, which changes nothing: a BN2d late in a network may see 1x1 maps.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)]
    counts: list[int] = []

    def count(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        counts.append(args[0].numel() // args[0].shape[1])

    handles = [layer.register_forward_pre_hook(count) for layer in layers]
    try:
        with kept_modes(model), torch.no_grad():
            model.eval()(inputs)
    except ValueError:  # torch's own refusal, from a BatchNorm without running statistics
        return False
    finally:
        for handle in handles:
            handle.remove()
    return all(n > 1 for n in counts)

"""The mismatch of training and test (FixBN, section 5.2): running statistics against those of the test batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbn_flwr.doctor.by_batch import normalising_by_batch
from fedbn_flwr.doctor.clients import ClientData, classes_of, examples_a_pass, inputs_at, outputs_of, parts
from fedbn_flwr.errors import DataError
from fedbn_flwr.training.copying import copied
from fedbn_flwr.training.memory_format import inputs_for

__all__ = [
    "LogitLoss",
    "Loss",
    "Mismatch",
    "RowLoss",
    "accuracy_by_class",
    "default_loss",
    "mismatch",
    "scores",
]

Loss = Callable[[Tensor, Tensor], Tensor]
"""Returns the mean loss of a batch, from outputs and targets, as ``nn.CrossEntropyLoss()`` does."""

_BATCH = 256


@dataclass(frozen=True)
class Mismatch:
    """The same test examples under running statistics and under those of the test batch.

    The batches mix the clients' examples at random; all layers but BatchNorm are in eval mode.

    Attributes:
        examples: N.
        running_loss: mean loss under running statistics.
        batch_loss: mean loss under batch statistics.
        running_accuracy: None if the targets are not classes.
        batch_accuracy: the same under batch statistics.
        z: the mean of the examples' differences in loss over its standard error; above 0 if running statistics lose.
        accuracy_z: the same of the differences in being right, with one more example that is equally right: a
            difference that all examples have would be certain from two of them. 0 if the targets are not classes.
    """

    examples: int
    running_loss: float
    batch_loss: float
    running_accuracy: float | None
    batch_accuracy: float | None
    z: float
    accuracy_z: float = 0.0

    @property
    def accuracy_lost(self) -> float:
        """Accuracy under batch statistics minus that under running ones; 0 if the targets are not classes."""
        return (self.batch_accuracy or 0.0) - (self.running_accuracy or 0.0)


@dataclass
class LogitLoss:
    """``default_loss`` for targets 0 and 1, to which one output an example is a logit: binary cross-entropy.

    Attributes:
        used: whether the model had one output an example.
    """

    used: bool = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss."""
        if outputs.numel() != len(targets):
            return default_loss(outputs, targets)
        self.used = True
        return functional.binary_cross_entropy_with_logits(outputs.reshape(-1), targets.reshape(-1).to(outputs.dtype))


@dataclass
class RowLoss:
    """The loss of targets that are rows of 0 and 1, one for each output.

    Attributes:
        one_hot: whether each row has a single 1: cross-entropy, else binary cross-entropy of each output.
    """

    one_hot: bool

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss."""
        if outputs.shape != targets.shape:
            return default_loss(outputs, targets)
        targets = targets.to(outputs.dtype)
        if self.one_hot:
            return functional.cross_entropy(outputs, targets)
        return functional.binary_cross_entropy_with_logits(outputs, targets)


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy for classes, the mean squared error for numbers of the outputs' shape.

    Raises:
        DataError: the targets are neither.
    """
    by_class = outputs.dim() > 1 and outputs.shape[1] > 1 and targets.numel() * outputs.shape[1] == outputs.numel()
    if by_class and not targets.is_floating_point():
        return functional.cross_entropy(outputs, targets.long().reshape(len(outputs), *outputs.shape[2:]))
    if targets.numel() == outputs.numel():
        return functional.mse_loss(outputs, targets.to(outputs.dtype).reshape(outputs.shape))
    raise DataError(
        f"no loss is known for outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} of {targets.dtype}. "
        "Pass loss=, a function of both that returns a mean, nn.CrossEntropyLoss() say."
    )


def mismatch(model: nn.Module, clients: Sequence[ClientData], loss: Loss, generator: torch.Generator) -> Mismatch:
    """Return the mismatch of training and test on the examples of all clients; the model does not change."""
    targets, classes = torch.cat([c.targets for c in clients]), classes_of(clients)
    batches = _batches(clients, generator)
    models = copied(model).eval(), normalising_by_batch(model)
    running, by_batch = (_run(model, clients, targets, classes, batches, loss) for model in models)
    z, accuracy_z = _z(running[0] - by_batch[0]), 0.0
    if running[1] is not None and by_batch[1] is not None:
        accuracy_z = _z(functional.pad(by_batch[1] - running[1], (0, 1)))
    one, other = (None if right is None else float(right.mean()) for _, right in (running, by_batch))
    return Mismatch(len(targets), float(running[0].mean()), float(by_batch[0].mean()), one, other, z, accuracy_z)


def scores(
    model: nn.Module, clients: Sequence[ClientData], loss: Loss, generator: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return each example's loss, float64 (N,), whether it is right, or None, and its place among all clients'."""
    batches = _batches(clients, generator)
    targets = torch.cat([c.targets for c in clients])
    losses, right = _run(copied(model).eval(), clients, targets, classes_of(clients), batches, loss)
    return losses, right, torch.cat(batches)


def _batches(clients: Sequence[ClientData], generator: torch.Generator) -> list[Tensor]:
    """Return the positions of each batch: the examples of all clients, mixed at random."""
    return parts(torch.randperm(sum(map(len, clients)), generator=generator), examples_a_pass(clients, _BATCH))


def _z(differences: Tensor) -> float:
    error = float(differences.std()) / math.sqrt(len(differences))
    return float(differences.mean()) / error if error else 0.0


def accuracy_by_class(model: nn.Module, clients: Sequence[ClientData], batch_size: int) -> float | None:
    """Return the accuracy under batch statistics if the test examples come sorted by class; None without classes.

    Under running statistics the order makes no difference.
    """
    if (targets := classes_of(clients)) is None:
        return None
    batches = [b for b in torch.split(torch.argsort(targets, stable=True), max(2, batch_size)) if len(b) > 1]
    _, right = _run(normalising_by_batch(model), clients, targets, targets, batches, default_loss)
    return None if right is None else float(right.mean())


def _run(
    model: nn.Module,
    clients: Sequence[ClientData],
    targets: Tensor,
    classes: Tensor | None,
    batches: Sequence[Tensor],
    loss: Loss,
) -> tuple[Tensor, Tensor | None]:
    """Return each example's loss, float64 (N,), and whether it is right; None if targets are not classes."""
    losses, right, prepared = [], [], inputs_for(model)
    with torch.no_grad():
        for positions in batches:
            outputs = outputs_of(model, prepared(inputs_at(clients, positions)))
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            wanted = targets[positions].to(outputs.device)  # the loss may hold class weights there
            losses += [loss(outputs[n : n + 1], wanted[n : n + 1]).double() for n in range(len(positions))]
            if classes is not None and outputs.dim() == 2 and outputs.shape[1] > 1:
                right.append((outputs.argmax(1).cpu() == classes[positions]).double())
    return torch.stack(losses).cpu(), torch.cat(right) if right else None

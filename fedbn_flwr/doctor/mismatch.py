"""The mismatch of training and test (FixBN, section 5.2).

The same examples are tested twice, under running statistics and under the statistics
of the test batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, TensorDataset, default_collate

from fedbn_flwr.doctor.by_batch import normalising_by_batch
from fedbn_flwr.doctor.clients import (
    ClientExamples,
    classes_of,
    mixed_batches,
)
from fedbn_flwr.errors import DataError
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.borrowed import borrowed

Loss = Callable[[Tensor, Tensor], Tensor]
"""Function that returns the mean loss of a batch, from outputs and targets, as
``nn.CrossEntropyLoss()`` does.
"""


@dataclass(frozen=True)
class Mismatch:
    """Results of the same test examples under running and under batch statistics.

    The batches mix the clients' examples at random. All layers except BatchNorm are in
    eval mode.

    Attributes:
        examples: number N of examples.
        running_loss: mean loss under running statistics.
        batch_loss: mean loss under batch statistics.
        running_accuracy: accuracy under running statistics; None if the targets are not
            classes.
        batch_accuracy: accuracy under batch statistics, or None.
        z: mean of the examples' differences in loss, divided by the standard error of
            the mean; positive if running statistics do worse. The z of the differences
            in correctness is used instead if it is larger. For this second z, one
            example without a difference is added, because a difference that is equal
            for all examples would seem certain after two examples.
    """

    examples: int
    running_loss: float
    batch_loss: float
    running_accuracy: float | None
    batch_accuracy: float | None
    z: float


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy loss for classes.

    Raises:
        DataError: the targets are not classes.
    """
    # The outputs are scores of C > 1 classes if their shape is (N, C, ...) and there is
    # one integer target for each C scores, such as targets (N, ...) or (N, 1).
    by_class = (
        outputs.dim() > 1
        and outputs.shape[1] > 1
        and targets.numel() * outputs.shape[1] == outputs.numel()
    )
    if not by_class or targets.is_floating_point():
        raise DataError(
            f"there is no default loss for outputs {tuple(outputs.shape)} and targets"
            f" {tuple(targets.shape)} of {targets.dtype}. Pass loss=, a function of"
            " both that returns the mean loss, such as nn.CrossEntropyLoss(),"
            " nn.BCEWithLogitsLoss() or nn.MSELoss()."
        )
    return functional.cross_entropy(
        outputs, targets.long().reshape(len(outputs), *outputs.shape[2:])
    )


def mismatch(
    model: nn.Module,
    clients: Sequence[ClientExamples],
    loss: Loss,
    generator: torch.Generator,
) -> Mismatch:
    """Return the mismatch on all clients' examples, with the model unchanged."""
    batches = mixed_batches(clients, generator)
    with borrowed(model) as working:
        running_loss, running_right = _run(working.eval(), clients, batches, loss)
    with normalising_by_batch(model) as working:
        batch_loss, batch_right = _run(working, clients, batches, loss)
    z = _z(running_loss - batch_loss)
    running, by_batch = None, None
    if running_right is not None and batch_right is not None:
        # Add one example with the same result in both runs, see ``Mismatch.z``.
        z = max(z, _z(functional.pad(batch_right - running_right, (0, 1))))
        running, by_batch = float(running_right.mean()), float(batch_right.mean())
    return Mismatch(
        len(running_loss),
        float(running_loss.mean()),
        float(batch_loss.mean()),
        running,
        by_batch,
        z,
    )


def _z(differences: Tensor) -> float:
    """Return the mean in units of its standard error, or 0 if all values are equal."""
    error = float(differences.std()) / math.sqrt(len(differences))
    return float(differences.mean()) / error if error else 0.0


def _run(
    model: nn.Module,
    clients: Sequence[ClientExamples],
    batches: Sequence[Tensor],
    loss: Loss,
) -> tuple[Tensor, Tensor | None]:
    """Return each example's loss, and 1 for a right and 0 for a wrong answer, (N,).

    The second value is None if the targets are not classes.
    """
    losses, right, prepared = [], [], inputs_for(model)
    # A tensor of all inputs would be a second copy in memory.
    parts = [TensorDataset(one.inputs, one.targets) for one in clients]
    data: ConcatDataset[Any] = ConcatDataset(parts)
    classes = classes_of(clients)
    with torch.no_grad():
        for places in batches:
            inputs, targets = default_collate([data[at] for at in places.tolist()])
            outputs = model(prepared(inputs))
            # Losses in half precision would be too coarse for z.
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            # The loss may have class weights on the model's device.
            wanted = targets.to(outputs.device)
            # A loss returns the mean of a batch, but z needs the loss of each example.
            for n in range(len(places)):
                one = loss(outputs[n : n + 1], wanted[n : n + 1])
                losses.append(one.double())
            if classes is not None and outputs.dim() == 2 and outputs.shape[1] > 1:
                right.append((outputs.argmax(1).cpu() == classes[places]).double())
    return torch.stack(losses).cpu(), torch.cat(right) if right else None

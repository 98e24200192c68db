"""Local training, with the hooks of a method.

``train`` is the package's loop. BatchNorm layers are in train mode, unless a hook
changes it, and the layers update their running statistics once per step. ``Feed`` has
the batches of each loop, also of a user's. Torch only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError, DataError, OneExampleError
from fedbn_flwr.training.batches import (
    Batches,
    device_of,
    inputs_for,
    refuse_not_finite,
    with_positions,
)
from fedbn_flwr.training.borrowed import Lend, lending
from fedbn_flwr.training.client_hook import NamedHooks, Session
from fedbn_flwr.training.model_state import refuse_waiting, unwrap
from fedbn_flwr.training.optimizer_hooks import dense_gradient
from fedbn_flwr.training.optimizers import make_optimizer
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.settings import LocalTraining
from fedbn_flwr.training.single_examples import raise_named, takes_one_example
from fedbn_flwr.training.sums import Sums
from fedbn_flwr.training.tasks import CLASSIFICATION, TASKS, Task

__all__ = ["Feed", "TrainResult", "train"]

# Examples per batch in the search for a target that counts (known and not ignored).
_LOOKED_AT = 256
_NOTHING = nullcontext()
ONE_BY_ONE = (
    "batch-size=1 leaves one example in each batch, so BatchNorm cannot compute a"
    " variance: use a batch-size above 1, or another norm"
)


class Feed:
    """The batches of a client's round. ``training.train`` explains the arguments.

    Creating it puts the model into train mode.

    Attributes:
        sizes: the number of examples of each batch so far, without dropped batches.
        dropped: the number of dropped batches of one example.
        plain: the model without wrappers.
        prepared: moves inputs to the device of the model.

    Raises:
        DataError: there are no examples.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Batches,
        settings: LocalTraining,
        stream: Callable[[str], torch.Generator],
        task: Task,
        second: Lend | None = None,
    ) -> None:
        if not len(data):
            raise DataError(
                "no training examples: leave this client out or give it data"
            )
        self.model, self.data, self.settings = model, data, settings
        self.task = task
        self.sizes: list[int] = []
        self.dropped = 0
        self.plain = unwrap(model)
        self._stream, self.second = stream, lending(self.plain, task, second)
        self.prepared = inputs_for(self.plain)
        self._takes_one: bool | None = None
        model.train()

    @contextmanager
    def batches(self, session: Session) -> Iterator[Iterator[tuple[Any, Tensor]]]:
        """Give the batches on the model's device, and seed the dropout of the block.

        Raises:
            NormLayerError: a BatchNorm layer failed in the block. The error names it.
        """
        with seeded(self._stream("dropout").initial_seed()):
            batches = self._batches(session)
            try:
                yield batches
            except ValueError as error:
                size = self.sizes[-1] if self.sizes else 0
                raise_named(error, session.model, size)
            finally:
                batches.close()

    def _batches(self, session: Session) -> Generator[tuple[Any, Tensor], None, None]:
        device = device_of(self.plain)
        # The order of the batches, their augmentation and dropout have separate
        # streams, so that a change of one does not affect the others.
        order = self.settings.batches(len(self.data), self._stream("batches"))
        augment = self._stream("augment")
        for positions, (inputs, targets) in with_positions(self.data, order, augment):
            inputs = self.prepared(inputs)
            targets = self.task.on_device(targets, device)
            size = positions.shape[0]
            # A dropped batch does not count as a step.
            if size == 1 and self._drops(session, inputs, targets):
                self.dropped += 1
                continue
            self.sizes.append(size)
            yield inputs, targets

    def _drops(self, session: Session, inputs: Any, targets: Any) -> bool:
        """Return whether a batch of one example is dropped.

        It is dropped if a BatchNorm layer would get one value per channel.
        """
        if session.synchronises:
            return False
        if self._takes_one is None:  # once a round, because it takes a forward pass
            self._takes_one = takes_one_example(
                self.model, inputs, targets, self.second
            )
        return not self._takes_one

    def refuse_nothing(self) -> None:
        """Raise the error of a round if all its batches were dropped."""
        if self.sizes or not self.dropped:
            return
        if len(self.data) > 1:
            raise ConfigError(ONE_BY_ONE)
        # A single example is a batch of one for every batch size.
        raise OneExampleError(
            "this client has one training example, so BatchNorm cannot compute a"
            " variance: give it more examples, leave it out, or use another norm"
        )


@dataclass(frozen=True)
class TrainResult:
    """The result of one round of local training.

    Attributes:
        loss: mean loss over the processed examples, without penalties. The loss of a
            batch is computed before its step. A batch without counted targets has loss
            0.
        accuracy: the share of counted targets that are predicted correctly, before each
            step. It is None for a task without accuracy.
        num_processed: processed examples; an example counts in each step that uses it.
        num_steps: optimizer steps.
        num_dropped: dropped batches of one example, because a BatchNorm layer would
            get one value per channel.
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
    stream: Callable[[str], torch.Generator],
    hooks: NamedHooks = MappingProxyType({}),
    task: Task = CLASSIFICATION,
    second: Lend | None = None,
) -> TrainResult:
    """Train ``model`` in place for one round.

    Args:
        model: the model, on the device for training.
        data: the client's training data.
        settings: the number of steps, the batch size and the optimizer.
        learning_rate: rate of this round.
        stream: returns a CPU generator for a purpose ("batches", "augment", "dropout").
        hooks: the method's hooks by name.
        task: defines the loss and the counted targets.
        second: lends a second model, to try a batch of one example.

    Raises:
        ConfigError: every batch had one example and was dropped, or the loss has
            parameters that are not in the model.
        DataError: the data are empty or have no counted target; outputs or
            targets do not fit the task; or the loss is not finite, because an input is
            NaN or infinite.
        OneExampleError: the only example was dropped.
        NormLayerError: the forward pass of a BatchNorm layer raises a ValueError; the
            message names the layer. Or a compiler fails at an in-place operation
            between layers that a hook computes.
        ValueError: of torch, the model has no trainable parameter.
    """
    feed = Feed(model, data, settings, stream, task, second)
    # Hooks see the names without a wrapper's prefix; the passes use the wrapper.
    session, sums = Session(feed.plain, hooks), Sums(task)
    with session.block():
        refuse_waiting(model)
        optimizer = make_optimizer(model, settings)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        for hook in session.acting:
            hook.start(feed.plain, optimizer)
        # A hook may add parameters of its own.
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        autocast: AbstractContextManager[Any] = _NOTHING
        if settings.amp:
            autocast = torch.autocast(device_of(feed.plain).type, torch.bfloat16)
        loss_fn = task.training_loss or task.loss
        own_loss = loss_fn is not TASKS.get(task.name, CLASSIFICATION).loss
        with feed.batches(session) as batches:
            for inputs, targets in batches:
                with session.step(feed.sizes[-1]) if hooks else _NOTHING:
                    with autocast:
                        loss, outputs = task.step(model, inputs, targets)
                    total = loss
                    for penalty in session.penalties():
                        total = total + penalty
                    # Use None instead of 0, so that the backward pass can use its own
                    # tensors.
                    for parameter in trained:
                        parameter.grad = None
                    total.backward()  # type: ignore[no-untyped-call]
                    if own_loss and len(feed.sizes) == 1:
                        _refuse_other_parameters(loss, feed.plain, task)
                session.change_gradients(trained)
                if settings.weight_decay or settings.optimizer != "sgd":
                    for parameter in trained:  # torch refuses sparse gradients
                        dense_gradient(parameter)
                optimizer.bare_step()
                if outputs is not None:
                    outputs = outputs.detach()
                sums.add(loss.detach(), feed.sizes[-1], outputs, targets)
    if not feed.sizes:
        feed.refuse_nothing()
    sums.read()
    loss_of_round = sums.mean_loss(sums.sizes)
    if not any(sums.counted):
        _refuse_without_targets(data, task)
    if not math.isfinite(loss_of_round):
        refuse_not_finite(data, feed.prepared)
    share = (
        sums.accuracy if "accuracy" in task.metrics and outputs is not None else None
    )
    processed, steps = sum(sums.sizes), len(sums.sizes)
    return TrainResult(
        loss_of_round, share, processed, steps, feed.dropped, session.metrics
    )


def _refuse_other_parameters(loss: Tensor, model: nn.Module, task: Task) -> None:
    """Raise ConfigError if the user's loss has parameters outside the model.

    No optimizer trains them.
    """
    # Walk from the loss to the leaves of its graph.
    nodes: set[Any] = {None}
    front: set[Any] = {loss.grad_fn}
    while front:
        nodes |= front
        front = {after for node in front for after, _ in node.next_functions} - nodes
    leaves = {getattr(node, "variable", None) for node in nodes}
    for leaf in leaves.difference(model.parameters()):
        if isinstance(leaf, nn.Parameter):
            raise ConfigError(
                f"the training loss of task {task.name} has a parameter of shape"
                f" {tuple(leaf.shape)} that is not in the model, so it would be neither"
                " trained nor averaged. Use it in the forward pass of the model, or set"
                " requires_grad=False."
            )


def _refuse_without_targets(data: Batches, task: Task) -> None:
    """Raise DataError if no target counts.

    Such a client would only reduce the weight of the other clients.
    """
    for positions in torch.split(torch.arange(len(data)), _LOOKED_AT):
        targets = data.batch(positions, torch.Generator())[1]
        if task.counted(task.on_device(targets, targets.device)):
            return
    raise DataError(
        f"none of the {len(data)} training examples has a target that counts. Leave"
        " this client out or give it targets."
    )

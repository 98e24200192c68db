"""``Feed``: the batches of one round of local training, for each loop. Torch only."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.training.batches import (
    Batches,
    device_of,
    inputs_for,
    with_positions,
)
from fedbn_flwr.training.model_state import unwrap
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.session import Session
from fedbn_flwr.training.settings import LocalTraining
from fedbn_flwr.training.single_examples import name_layer, takes_one_example
from fedbn_flwr.training.tasks import Task

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
        self._stream = stream
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
                name_layer(error, session.model, size)
                raise
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
            if size == 1 and self._drops(session, inputs):
                self.dropped += 1
                continue
            self.sizes.append(size)
            yield inputs, targets

    def _drops(self, session: Session, inputs: Any) -> bool:
        """Return whether a batch of one example is dropped.

        It is dropped if a BatchNorm layer would get one value per channel.
        """
        if session.synchronises:
            return False
        if self._takes_one is None:  # once a round, because it takes a forward pass
            self._takes_one = takes_one_example(self.model, inputs)
        return not self._takes_one

    def refuse_nothing(self) -> None:
        """Raise the error of a round in which all batches were dropped."""
        if self.sizes or not self.dropped:
            return
        if len(self.data) > 1:
            raise ConfigError(ONE_BY_ONE)
        # A single example is a batch of one for every batch size.
        raise DataError(
            "this client has one training example, so BatchNorm cannot compute a"
            " variance: give it more examples, leave it out, or use another norm"
        )

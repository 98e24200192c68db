"""The data of a ``TorchClient``, and the random streams that draw from it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.messages.protocol import VALIDATION, MessageConfig
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.borrowed import borrowed
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.loaded import LoadedBatches
from fedbn_flwr.training.randomness import seeded, torch_generator
from fedbn_flwr.training.run_memory import first_time
from fedbn_flwr.training.tasks import Task

logger = logging.getLogger("flwr")

Examples = Batches | Dataset[Any]
"""A data set that a ``TorchClient`` takes."""


@dataclass(frozen=True)
class ClientData:
    """A client's data.

    Attributes:
        train: the training data; may be empty.
        tests: the test sets by name; the name is empty for a set without a name.
    """

    train: Batches
    tests: Mapping[str, Batches]

    def asked_for(self, names: Sequence[str]) -> Mapping[str, Batches]:
        """Return the test sets that the server asks for, or all if it names none.

        Raises:
            ConfigError: this client lacks one of them.
        """
        unknown = [name for name in names if name not in self.tests]
        if unknown:
            known = ", ".join(name or "a set without a name" for name in self.tests)
            raise ConfigError(
                f"this client has no test set {unknown[0]!r}; it has {known or 'none'}."
                f" Leave personal-{unknown[0]} out of eval-on, or give the TorchClient"
                f" this set: test_data={{{unknown[0]!r}: ...}}"
            )
        return {name: self.tests[name] for name in names or self.tests}

    def validation_loss(self, model: nn.Module, task: Task) -> float:
        """Return the model's loss on the test set "validation".

        Raises:
            DataError: there is no such set, or it is empty.
        """
        data = self.tests.get(VALIDATION)
        if data is None or len(data) == 0:
            raise DataError(
                "the strategy weighs this client by the loss on its validation data,"
                " but it has none: use a larger validation-share, or give TorchClient"
                f" this set: test_data={{{VALIDATION!r}: ...}}"
            )
        with borrowed(model) as lent:
            return evaluate(lent, data, task=task).loss

    def two_inputs(self) -> Any:
        """Return the inputs of two examples of the first set that has any."""
        data = next(data for data in (self.train, *self.tests.values()) if len(data))
        positions = torch.tensor([0, min(1, len(data) - 1)])
        # Pass a generator: data sets with random transforms warn without one.
        return data.batch(positions, torch.Generator())[0]

    def read_twice(self, client: int | str) -> None:
        """Log a warning if two reads of two examples under one seed differ.

        A process does this once in a run for each client.
        """
        if not first_time("read twice", client):
            return
        # The user's code may raise any exception. The training will raise it again.
        with suppress(Exception), seeded(0):
            first = tree_leaves(self.two_inputs())
            with seeded(0):
                again = tree_leaves(self.two_inputs())
            same = partial(np.array_equal, equal_nan=True)
            if not all(map(same, first, again)) and first_time("own random state"):
                logger.warning(
                    "The data set of client %s has a random generator or a position of"
                    " its own: two reads of the same examples differ, although the"
                    " default generators of torch, NumPy and Python were seeded alike."
                    " The results then depend on the number of processes and on a"
                    " resume. Draw from the default generators.",
                    client,
                )


@dataclass(frozen=True)
class ClientStreams:
    """A client's random streams, one for each purpose and round.

    Attributes:
        seed: the seed; None uses the seed that the server sends.
        client: the client's part of the streams' names.
    """

    seed: int | None
    client: int | str

    def generator(self, sent: MessageConfig, purpose: str) -> torch.Generator:
        """Return the generator for a purpose in this round."""
        seed = sent.seed if self.seed is None else self.seed
        keys: list[int | str] = [sent.server_round, self.client]
        return torch_generator(seed, purpose, *keys)


def as_batches(data: Any) -> Batches:
    """Return ``Batches`` unchanged, and a torch ``Dataset`` of pairs as ``Batches``.

    The pairs are collated as a ``DataLoader`` does.

    Raises:
        DataError: the data set has no length; or it is a ``DataLoader``, because its
            batches differ from the batches of the settings.
    """
    # Data sets of other libraries, such as Hugging Face, have a different method
    # ``batch``.
    method = getattr(data, "batch", None)
    if callable(method) and (
        not hasattr(data, "__getitem__")
        or "generator" in inspect.signature(method).parameters
    ):
        batches: Batches = data
        return batches
    if isinstance(data, DataLoader):
        raise DataError(
            f"a DataLoader with batch_size={data.batch_size} was passed, but the"
            " client's settings (LocalTraining) determine the batches and their order."
            " Pass its data set, loader.dataset, or"
            " fedbn_flwr.training.batches_of(loader) to keep its collate_fn."
        )
    return LoadedBatches(DataLoader(data))

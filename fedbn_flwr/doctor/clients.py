"""The clients' data, read from their loaders into memory, and passes over them."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, islice
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fedbn_flwr.errors import DataError
from fedbn_flwr.training.loaded import read_ahead, reader
from fedbn_flwr.training.randomness import seeded

Loaders = Mapping[Any, Iterable[Any]] | Sequence[Iterable[Any]]
"""A loader for each client, by name or in order. Each loader yields batches (inputs,
targets), as a ``DataLoader`` does.
"""

# Largest number of input values in a pass without gradients. They take 16 MiB, and a
# few times as much in a layer of a network.
_VALUES = 2**22
_FEWEST, _LARGEST = 32, 256  # fewest and most examples in a batch


@dataclass(frozen=True)
class ClientExamples:
    """Examples of one client.

    Attributes:
        name: name of the client.
        inputs: the inputs, (N, ...).
        targets: the targets, (N, ...).
        batch_size: number of examples in the client's largest training batch. It is the
            loader's batch size unless the user gives another.
        first_only: whether the examples are the first examples of a longer loader, in
            its order.
        columns: names of the columns of a table, if the data has them.
        units: the unit of each example, such as its patient, (N,); None if each example
            is its own unit.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    batch_size: int
    first_only: bool = False
    columns: Sequence[str] = ()
    units: Tensor | None = None

    def __len__(self) -> int:
        """Return N."""
        return len(self.inputs)

    @property
    def first_of_units(self) -> Tensor:
        """Whether an example is the first of its unit, (N,)."""
        units = range(len(self)) if self.units is None else self.units.tolist()
        # A later entry of a mapping replaces an earlier one.
        first = {unit: at for at, unit in reversed([*enumerate(units)])}
        found = torch.zeros(len(self), dtype=torch.bool)
        found[[*first.values()]] = True
        return found


def classes_of(clients: Sequence[ClientExamples]) -> Tensor | None:
    """Return the class of each example, or None if targets are not classes.

    The tensor is int64 of shape (N,). Targets are classes if each example has one
    integer, or one float that is 0 or 1.
    """
    if any(client.targets.numel() != len(client) for client in clients):
        return None
    targets = torch.cat([client.targets.flatten() for client in clients])
    # Binary targets are floats for nn.BCEWithLogitsLoss.
    binary = (targets == 0) | (targets == 1)
    if targets.is_floating_point() and not bool(binary.all()):
        return None
    return targets.long()


def read_clients(loaders: Loaders, max_examples: int) -> list[ClientExamples]:
    """Return the data of each client with examples.

    The default random generators are seeded while the loaders shuffle and augment, and
    restored afterwards.

    Raises:
        DataError: a loader does not yield pairs of tensors.
    """
    named = loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders)
    clients = []
    with seeded(0):
        for name, loader in named:
            client = _read_loader(str(name), loader, max_examples)
            if client is not None:
                clients.append(client)
    return clients


def _read_loader(
    name: str, loader: Iterable[Any], max_examples: int
) -> ClientExamples | None:
    """Return up to ``max_examples`` examples of a loader, or None if it has none.

    If there are more examples, a random sample is drawn, because a loader may be
    sorted, for example by class. If the data set has no indices, the sample has the
    first examples, in whole batches. An example that the sampler repeats is used once.
    """
    # If the examples have indices, read only the drawn examples.
    largest = 0
    source: AbstractContextManager[Iterable[Any]] = nullcontext(loader)
    epoch = _epoch(loader)
    if epoch is not None:
        largest = max(map(len, epoch), default=0)
        distinct = list(dict.fromkeys(chain(*epoch)))
        source = closing(_drawn(loader, distinct, max_examples, max(1, largest)))

    # If examples cannot be drawn from the loader, read batches until there are enough.
    inputs, targets = [], []
    count, first_only = 0, False
    with source as batches:
        for batch in batches:
            if count >= max_examples:
                first_only = True
                break
            x, y = _pair(name, batch)
            inputs.append(x.detach().cpu())
            targets.append(y.detach().cpu())
            largest = max(largest, len(x))
            count += len(x)
    if not count:
        return None

    joined = torch.cat(inputs), torch.cat(targets)
    # A data set, such as one of a DataFrame, may name its columns.
    columns = [*map(str, getattr(getattr(loader, "dataset", None), "columns", ()))]
    return ClientExamples(name, *joined, largest, first_only, columns)


def _pair(name: str, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a batch."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, targets = batch
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return inputs, targets
    raise DataError(
        f"the loader of client {name} yields {type(batch).__name__}, but it must"
        " yield (inputs, targets), two tensors. Wrap the loader in a generator that"
        " yields them. If you passed one loader, pass a list with one loader per"
        " client: [loader]."
    )


def _epoch(loader: Iterable[Any]) -> list[list[int]] | None:
    """Return the indices of each batch of an epoch, or None if they cannot be read.

    A subclass of a loader may yield other examples than its sampler selects.
    """
    if type(loader) is not DataLoader:
        return None
    data, sampler = loader.dataset, loader.batch_sampler
    if sampler is None or isinstance(data, IterableDataset):
        return None
    if not hasattr(data, "__len__"):
        return None
    # Take at most one batch per example, because the sampler may be endless.
    # Without a conversion, equal indices that are tensors would count as different.
    with suppress(TypeError):
        return [[*map(index, batch)] for batch in islice(sampler, len(data))]
    return None


def _drawn(
    loader: Any, order: list[int], max_examples: int, size: int
) -> Generator[Any, None, None]:
    """Yield the loader's batches with each index once, or with a sample."""
    if len(order) > max_examples:
        places = torch.randperm(len(order))[:max_examples].tolist()
        order = [order[place] for place in places]
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    # Draw a seed as a pass of the loader does. The seed differs between clients, so
    # their random transforms differ.
    seed = int(torch.empty((), dtype=torch.int64).random_())
    read = reader(loader.dataset, loader.collate_fn)
    draws = torch.Generator().manual_seed(seed)
    yield from read_ahead(read, batches, draws, loader, loader.dataset)


def batch_length(clients: Sequence[ClientExamples]) -> int:
    """Return the number of examples in a pass.

    It is 256, or fewer if examples are large.
    """
    values = clients[0].inputs[:1].numel()
    return min(_LARGEST, max(_FEWEST, _VALUES // max(1, values)))


def mixed_batches(
    clients: Sequence[ClientExamples], generator: torch.Generator
) -> list[Tensor]:
    """Return the positions of each batch in all clients' examples, mixed at random.

    The batches have nearly equal sizes, see ``batch_length``.
    """
    order = torch.randperm(sum(map(len, clients)), generator=generator)
    return list(order.tensor_split(math.ceil(len(order) / batch_length(clients))))

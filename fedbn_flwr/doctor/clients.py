"""The clients' data, read from their loaders into memory, and passes over them."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from itertools import chain, islice
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from fedbn_flwr.errors import DataError
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.read_ahead import read_ahead
from fedbn_flwr.training.reading import reader

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
        first_only: whether the examples are the first ones of a longer loader, in the
            order of the loader.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    batch_size: int
    first_only: bool = False

    def __len__(self) -> int:
        """Return N."""
        return len(self.inputs)

    @property
    def classes(self) -> Tensor | None:
        """The class of each example, int64 (N,), or None if targets are not classes.

        Targets are classes if each example has one integer, or one float that is 0 or
        1.
        """
        targets = self.targets
        if targets.numel() != len(self):
            return None
        if targets.is_floating_point():
            # Binary targets are floats for nn.BCEWithLogitsLoss.
            binary = (targets == 0) | (targets == 1)
            if not bool(binary.all()):
                return None
        return targets.reshape(len(self)).long()


def classes_of(clients: Sequence[ClientExamples]) -> Tensor | None:
    """Return the classes of all examples, or None if a client's targets are others."""
    known = []
    for client in clients:
        classes = client.classes
        if classes is None:
            return None
        known.append(classes)
    return torch.cat(known)


def read_clients(loaders: Loaders, max_examples: int) -> list[ClientExamples]:
    """Return the data of each client with examples.

    The default random generators are seeded while the loaders shuffle and augment.
    Afterwards, they and the loaders' own generators are restored.

    Raises:
        DataError: a loader does not yield pairs of tensors, or its batches cannot be
            joined.
    """
    named = loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders)
    clients = []
    with seeded(0):
        for name, loader in named:
            with _own_generators_kept(loader):
                client = _read_loader(str(name), loader, max_examples)
            if client is not None:
                clients.append(client)
    return clients


@contextmanager
def _own_generators_kept(loader: Iterable[Any]) -> Iterator[None]:
    """Restore the random generators that belong to a loader and its samplers."""
    batches = getattr(loader, "batch_sampler", None)
    generators = []
    for owner in (
        loader,
        getattr(loader, "sampler", None),
        batches,
        getattr(batches, "sampler", None),
    ):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generators.append(generator)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


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

    try:
        joined = torch.cat(inputs), torch.cat(targets)
    except RuntimeError as error:
        raise DataError(
            f"the loader of client {name} yields batches that cannot be joined: {error}"
            " Pad or crop the examples to one shape."
        ) from error
    return ClientExamples(name, *joined, largest, first_only)


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

    A loader with its own ``__iter__`` may yield other examples than its sampler
    selects.
    """
    if not isinstance(loader, DataLoader):
        return None
    if type(loader).__iter__ is not DataLoader.__iter__:
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


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the outputs of the model.

    Raises:
        DataError: the outputs are not a tensor.
    """
    outputs = model(inputs)
    if not isinstance(outputs, Tensor):
        raise DataError(
            f"the model returns {type(outputs).__name__}, not one tensor. Wrap it in a"
            " module that returns only the tensor for the loss."
        )
    return outputs


def mixed_batches(
    clients: Sequence[ClientExamples], generator: torch.Generator
) -> list[Tensor]:
    """Return the positions of each batch in all clients' examples, mixed at random.

    The batches have nearly equal sizes: 256 examples, or fewer if examples are large.
    """
    values = clients[0].inputs[:1].numel()
    size = min(_LARGEST, max(_FEWEST, _VALUES // max(1, values)))
    order = torch.randperm(sum(map(len, clients)), generator=generator)
    return list(order.tensor_split(math.ceil(len(order) / size)))


def inputs_at(clients: Sequence[ClientExamples], places: Tensor) -> Tensor:
    """Return the inputs at the given positions in the sequence of all examples.

    The clients' inputs are not joined, because that would hold a second copy in memory.
    """
    ends = torch.tensor([len(client) for client in clients]).cumsum(0)
    owners = torch.searchsorted(ends, places, right=True)
    # ``ends`` has the end of each client in the list of all examples. Therefore the
    # index within a client is negative and counts from the client's end.
    within = places - ends[owners]
    chosen = zip(owners.tolist(), within.tolist(), strict=True)
    return torch.stack([clients[k].inputs[n] for k, n in chosen])

"""The clients' data, read from their loaders into memory, and passes over all of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from fedbn_flwr.errors import DataError
from fedbn_flwr.training.randomness import seeded

__all__ = [
    "ClientData",
    "Loaders",
    "classes_of",
    "inputs_at",
    "mixed_batches",
    "outputs_of",
    "read_clients",
]

Loaders = Mapping[Any, Iterable[Any]] | Sequence[Iterable[Any]]
"""A loader for each client, by name or in order; it yields batches (inputs, targets),
as a ``DataLoader`` does.
"""

# Values of the inputs of a pass without gradient: 16 MiB, and a few times as much in a
# layer of a network.
_VALUES = 2**22
_FEWEST, _LARGEST = 32, 256  # examples, for statistics of a batch


@dataclass(frozen=True)
class ClientData:
    """Examples of one client.

    Attributes:
        name: the client.
        inputs: (N, ...).
        targets: (N, ...).
        batch_size: examples in the largest batch of its training: the loader's, unless
            another is known.
        first_only: whether these are the first examples of a longer loader, in its
            order.
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
        """The class of each example, int64 (N,); None if the targets are not classes.

        Classes are one integer an example, or a float that is 0 or 1.
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


def classes_of(clients: Sequence[ClientData]) -> Tensor | None:
    """Return the classes of all examples; None if one client's are not classes."""
    known = []
    for client in clients:
        classes = client.classes
        if classes is None:
            return None
        known.append(classes)
    return torch.cat(known)


def read_clients(loaders: Loaders, max_examples: int) -> list[ClientData]:
    """Return the data of each client with examples.

    The default random generators are seeded while the loaders shuffle and augment, and
    restored afterwards, as are the loaders' own generators.

    Raises:
        DataError: a loader yields no pairs of tensors, or batches that cannot be
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
    """Restore the generators that a loader and its samplers have of their own."""
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
) -> ClientData | None:
    """Return up to ``max_examples`` examples of a loader; None if it has none.

    Of more examples they are drawn at random, since a loader may be sorted, by class
    say; where the data set has no indices they are the first, in whole batches. An
    example that the sampler repeats is used once.
    """
    # A loader of numbered examples is replaced by one that yields the drawn ones.
    largest = 0
    epoch = _epoch(loader)
    if epoch is not None:
        largest = max(map(len, epoch), default=0)
        distinct = list(dict.fromkeys(chain(*epoch)))
        loader = _drawn(loader, distinct, max_examples, max(1, largest))

    # Of a loader that cannot be drawn from, the first batches until there are enough.
    inputs, targets = [], []
    count, first_only = 0, False
    for batch in loader:
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
    return ClientData(name, *joined, largest, first_only)


def _pair(name: str, batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, targets = batch
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return inputs, targets
    raise DataError(
        f"the loader of client {name} yields {type(batch).__name__}; it must"
        " yield (inputs, targets), two tensors. Wrap it in a generator that"
        " does. If you passed one loader, pass a list of loaders, one for each"
        " client: [loader]."
    )


def _epoch(loader: Iterable[Any]) -> list[list[int]] | None:
    """Return the indices of each batch of an epoch; None if there are none to read.

    A loader with an ``__iter__`` of its own may yield something else than its sampler
    says.
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
    # A sampler may be endless.
    epoch = [list(batch) for batch in islice(sampler, len(data))]
    if all(isinstance(index, int) for index in chain(*epoch)):
        return epoch
    return None


def _drawn(
    loader: Any, order: list[int], max_examples: int, size: int
) -> DataLoader[Any]:
    """Return the loader with each index once; of too many some are drawn."""
    if len(order) > max_examples:
        places = torch.randperm(len(order))[:max_examples].tolist()
        order = [order[place] for place in places]
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
    )


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the model's outputs.

    Raises:
        DataError: they are no tensor.
    """
    outputs = model(inputs)
    if not isinstance(outputs, Tensor):
        raise DataError(
            f"the model returns {type(outputs).__name__}, not one tensor. Wrap it in a"
            " module that returns the one for the loss."
        )
    return outputs


def mixed_batches(
    clients: Sequence[ClientData], generator: torch.Generator
) -> list[Tensor]:
    """Return the places of each batch among all clients' examples, mixed at random.

    The batches have nearly equal sizes: 256 examples, fewer of large ones.
    """
    values = clients[0].inputs[:1].numel()
    size = min(_LARGEST, max(_FEWEST, _VALUES // max(1, values)))
    order = torch.randperm(sum(map(len, clients)), generator=generator)
    return list(order.tensor_split(math.ceil(len(order) / size)))


def inputs_at(clients: Sequence[ClientData], places: Tensor) -> Tensor:
    """Return the inputs at these places of all clients' examples, counted through.

    The clients' inputs are not joined, which would hold all of them in memory twice.
    """
    ends = torch.tensor([len(client) for client in clients]).cumsum(0)
    owners = torch.searchsorted(ends, places, right=True)
    # Counted from the client's end, so negative.
    within = places - ends[owners]
    chosen = zip(owners.tolist(), within.tolist(), strict=True)
    return torch.stack([clients[k].inputs[n] for k, n in chosen])

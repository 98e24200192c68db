"""The clients' data, read from their loaders into memory up to a number of examples,
and passes over all of them.
"""

from __future__ import annotations

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
        """The class of each example, int64 (N,); None if the targets are not one
        integer, or 0 or 1, an example.
        """
        targets = self.targets
        if targets.numel() != len(self):
            return None
        if targets.is_floating_point() and not bool(
            ((targets == 0) | (targets == 1)).all()
        ):
            return None
        return targets.reshape(len(self)).long()


def classes_of(clients: Sequence[ClientData]) -> Tensor | None:
    """Return the classes of all clients' examples; None if one client's targets are not
    classes.
    """
    known = [classes for client in clients if (classes := client.classes) is not None]
    return torch.cat(known) if len(known) == len(clients) else None


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
    """Restore the state of the generators that a loader and its samplers have of their
    own.
    """
    batches = getattr(loader, "batch_sampler", None)
    owners = (
        loader,
        getattr(loader, "sampler", None),
        batches,
        getattr(batches, "sampler", None),
    )
    generators = [
        g
        for owner in owners
        if isinstance(g := getattr(owner, "generator", None), torch.Generator)
    ]
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
    inputs, targets, largest, count = list[Tensor](), list[Tensor](), 0, 0
    first_only = False
    epoch = _epoch(loader)
    if epoch is not None:
        largest = max(map(len, epoch), default=0)
        loader = _drawn(
            loader, list(dict.fromkeys(chain(*epoch))), max_examples, max(1, largest)
        )
    for batch in loader:
        if count >= max_examples:
            first_only = True
            break
        if (
            not isinstance(batch, (tuple, list))
            or len(batch) != 2
            or not all(isinstance(t, Tensor) for t in batch)
        ):
            raise DataError(
                f"the loader of client {name} yields {type(batch).__name__}; it must"
                " yield (inputs, targets), two tensors. Wrap it in a generator that"
                " does. If you passed one loader, pass a list of loaders, one for each"
                " client: [loader]."
            )
        inputs.append(batch[0].detach().cpu())
        targets.append(batch[1].detach().cpu())
        largest, count = max(largest, len(batch[0])), count + len(batch[0])
    if not count:
        return None
    try:
        return ClientData(
            name, torch.cat(inputs), torch.cat(targets), largest, first_only
        )
    except RuntimeError as error:
        raise DataError(
            f"the loader of client {name} yields batches that cannot be joined: {error}"
            " Pad or crop the examples to one shape."
        ) from error


def _epoch(loader: Iterable[Any]) -> list[list[int]] | None:
    """Return the indices of each batch of an epoch; None if the examples are not read
    by whole numbers.
    """
    if (
        not isinstance(loader, DataLoader)
        or type(loader).__iter__ is not DataLoader.__iter__
    ):
        return None
    data, sampler = loader.dataset, loader.batch_sampler
    if (
        sampler is None
        or isinstance(data, IterableDataset)
        or not hasattr(data, "__len__")
    ):
        return None
    # a sampler may be endless
    epoch = [list(batch) for batch in islice(sampler, len(data))]
    return epoch if all(isinstance(index, int) for index in chain(*epoch)) else None


def _drawn(
    loader: Any, order: list[int], max_examples: int, size: int
) -> DataLoader[Any]:
    """Return the loader with each index once, and at most so many of them, drawn at
    random.
    """
    if len(order) > max_examples:
        order = [
            order[place] for place in torch.randperm(len(order))[:max_examples].tolist()
        ]
    return DataLoader(
        loader.dataset,
        batch_sampler=[
            order[start : start + size] for start in range(0, len(order), size)
        ],
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
    """Return the places of each batch among all clients' examples, mixed at random;
    batches of nearly equal size.

    A pass has 256 examples, fewer of large ones.
    """
    size = min(_LARGEST, max(_FEWEST, _VALUES // max(1, clients[0].inputs[:1].numel())))
    order = torch.randperm(sum(map(len, clients)), generator=generator)
    return list(order.tensor_split(-(-len(order) // size)))


def inputs_at(clients: Sequence[ClientData], places: Tensor) -> Tensor:
    """Return the inputs at these places of all clients' examples, counted through in
    order, without joining them.
    """
    ends = torch.tensor([len(client) for client in clients]).cumsum(0)
    owners = torch.searchsorted(ends, places, right=True).tolist()
    # from the client's end
    within = [
        place - int(ends[k]) for k, place in zip(owners, places.tolist(), strict=True)
    ]
    return torch.stack(
        [clients[k].inputs[n] for k, n in zip(owners, within, strict=True)]
    )

"""The clients' data, read from their loaders into memory up to a number of examples, and passes over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from fedbn_flwr.errors import DataError
from fedbn_flwr.training.randomness import seeded

__all__ = [
    "ClientData",
    "Loaders",
    "classes_of",
    "examples_a_pass",
    "inputs_at",
    "outputs_of",
    "parts",
    "read_clients",
]

Loaders = Mapping[Any, Iterable[Any]] | Sequence[Iterable[Any]]
"""A loader for each client, by name or in order; it yields batches (inputs, targets), as a ``DataLoader`` does."""

# Values of the inputs of a pass without gradient: 16 MiB, and a few times as much in a layer of a network.
_VALUES = 2**22
_FEWEST = 32  # examples, for statistics of a batch


@dataclass(frozen=True)
class ClientData:
    """Examples of one client; it is a data set for training and evaluation (``Batches``).

    Attributes:
        name: the client.
        inputs: (N, ...).
        targets: (N, ...).
        batch_size: examples in the largest batch of its training: the loader's, unless another is known.
        left_out: "" if these are all examples of the loader; else "drawn" at random from all, or its "first".
        repeats: whether the loader's sampler repeats examples; here each is once.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    batch_size: int
    left_out: Literal["", "drawn", "first"] = ""
    repeats: bool = False

    def __len__(self) -> int:
        """Return N."""
        return len(self.inputs)

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) at the positions."""
        return self.inputs[positions], self.targets[positions]

    @property
    def not_finite(self) -> int:
        """The number of examples whose input has NaN or infinity."""
        return int((~self.inputs.isfinite()).flatten(1).any(1).sum()) if self.inputs.dim() > 1 else 0

    @property
    def binary(self) -> bool:
        """Whether the targets are one 0 or 1 an example."""
        return self.targets.numel() == len(self) and bool(((self.targets == 0) | (self.targets == 1)).all())

    @property
    def rows(self) -> bool:
        """Whether the targets are a row of 0 and 1 an example."""
        return (
            self.targets.dim() == 2
            and self.targets.shape[1] > 1
            and bool(((self.targets == 0) | (self.targets == 1)).all())
        )

    @property
    def classes(self) -> Tensor | None:
        """The class of each example, int64 (N,); None if the targets are not one class an example.

        A class is an integer, a 0 or 1, or a row with a single 1.
        """
        if self.rows and bool((self.targets.sum(1) == 1).all()):
            return self.targets.long().argmax(1)
        if self.targets.numel() != len(self):
            return None
        return self.targets.reshape(len(self)).long() if self.binary or not self.targets.is_floating_point() else None


def classes_of(clients: Sequence[ClientData]) -> Tensor | None:
    """Return the classes of all clients' examples; None if one client's targets are not classes."""
    known = [classes for client in clients if (classes := client.classes) is not None]
    return torch.cat(known) if len(known) == len(clients) else None


def read_clients(loaders: Loaders, max_examples: int, empty: list[str] | None = None) -> list[ClientData]:
    """Return the data of each client; a client without examples is left out, and its name added to ``empty``.

    The default random generators are seeded while the loaders shuffle and augment, and restored afterwards, as are the
    loaders' own generators.

    Raises:
        DataError: a loader yields no pairs of tensors, or batches that cannot be joined.
    """
    named = loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders)
    clients: list[ClientData] = []
    without = [] if empty is None else empty
    with seeded(0):
        for name, loader in named:
            with _own_generators_kept(loader):
                client = _read_loader(str(name), loader, max_examples)
            if client is None:
                without.append(str(name))
            else:
                clients.append(client)
    return clients


@contextmanager
def _own_generators_kept(loader: Iterable[Any]) -> Iterator[None]:
    """Restore the state of the generators that a loader and its samplers have of their own."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    generators = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _read_loader(name: str, loader: Iterable[Any], max_examples: int) -> ClientData | None:
    """Return up to ``max_examples`` examples of a loader; None if it has none.

    Of more examples they are drawn at random, since a loader may be sorted, by class say; where that needs a pass over
    all data, which has no indices, they are the first, in whole batches. An example that the sampler repeats is used
    once: repeated ones are no independent examples.
    """
    inputs, targets, largest, count = list[Tensor](), list[Tensor](), 0, 0
    left_out: Literal["", "drawn", "first"] = ""
    repeats = False
    if (epoch := _epoch(loader)) is not None:
        order = [index for batch in epoch for index in batch]
        first: dict[Any, Any] = {}
        for index in order:
            first.setdefault(_hashable(index), index)
        distinct = [*first.values()]
        repeats = len(distinct) < len(order)
        if len(distinct) > max_examples:
            distinct = [distinct[place] for place in torch.randperm(len(distinct))[:max_examples].tolist()]
            left_out = "drawn"
        if repeats or left_out:
            largest = max(map(len, epoch))
            loader = _over(loader, [distinct[start : start + largest] for start in range(0, len(distinct), largest)])
    for batch in loader:
        if count >= max_examples:
            left_out = "first"
            break
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(t, Tensor) for t in batch):
            remedy = "Wrap it in a generator that does."
            if isinstance(batch, Tensor):
                remedy += " If you passed one loader, pass a list of loaders, one for each client: [loader]."
            raise DataError(
                f"the loader of client {name} yields {_shape_of(batch)}; it must yield (inputs, targets), two tensors. "
                f"{remedy}"
            )
        inputs.append(batch[0].detach().cpu())
        targets.append(batch[1].detach().cpu())
        largest, count = max(largest, len(batch[0])), count + len(batch[0])
    if not count:
        return None
    try:
        return ClientData(name, torch.cat(inputs), torch.cat(targets), largest, left_out, repeats)
    except RuntimeError as error:
        shapes = sorted({str(tuple(batch.shape)) for batch in inputs})
        raise DataError(
            f"the loader of client {name} yields batches that cannot be joined, inputs of {', '.join(shapes)}: "
            f"{error} Pad or crop the examples to one shape."
        ) from error


def _epoch(loader: Iterable[Any]) -> list[list[Any]] | None:
    """Return the indices of each batch of an epoch.

    None if the examples have no indices: a stream, another class with its own iteration.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    data, sampler = loader.dataset, loader.batch_sampler
    if sampler is None or isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        return None
    return [list(batch) for batch in islice(sampler, len(data))]  # a sampler may be endless


def _hashable(index: Any) -> Any:
    """Return an index as a key: samplers may give tensors, or lists such as [index, size]."""
    index = index.tolist() if isinstance(index, Tensor) else index
    return tuple(map(_hashable, index)) if isinstance(index, (list, tuple)) else index


def _over(loader: Any, batches: list[list[Any]]) -> DataLoader[Any]:
    """Return the loader with other batches of indices."""
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
            f"the model returns {_shape_of(outputs)}, not one tensor. Wrap it in a module that returns the one for the "
            "loss."
        )
    return outputs


def _shape_of(batch: Any) -> str:
    kind = type(batch).__name__
    return (
        f"{kind} of {len(batch)} ({', '.join(type(b).__name__ for b in batch)})" if kind in ("tuple", "list") else kind
    )


def examples_a_pass(clients: Sequence[ClientData], most: int) -> int:
    """Return the number of examples of a pass: ``most``, fewer of large examples, but 32."""
    return min(most, max(_FEWEST, _VALUES // _size(clients)))


def parts(order: Tensor, size: int) -> list[Tensor]:
    """Return parts of nearly equal size of the positions: a last one of one example fails in BatchNorm."""
    return list(order.tensor_split(-(-len(order) // size)))


def inputs_at(clients: Sequence[ClientData], positions: Tensor) -> Tensor:
    """Return the inputs at positions of all clients' examples, counted through in order."""
    ends = torch.tensor([len(client) for client in clients]).cumsum(0)
    owners = torch.searchsorted(ends, positions, right=True)
    inputs = torch.empty((len(positions), *clients[0].inputs.shape[1:]), dtype=clients[0].inputs.dtype)
    for k in torch.unique(owners).tolist():
        of_client = owners == k
        inputs[of_client] = clients[k].inputs[positions[of_client] - (int(ends[k]) - len(clients[k]))]
    return inputs


def _size(clients: Sequence[ClientData]) -> int:
    return max(1, clients[0].inputs[:1].numel())

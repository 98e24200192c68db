"""Torch data sets as the ``Batches`` of training and evaluation.

The source is a torch ``Dataset``, or the data set of a ``DataLoader``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from fedbn_flwr.errors import DataError
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.read_ahead import read_ahead
from fedbn_flwr.training.reading import name_of, reader


class LoadedBatches:
    """The data set of a ``DataLoader`` as ``Batches``.

    Args:
        loader: the ``DataLoader``.
        plain: the same examples in the same order without random transforms. They are
            read if no generator is given. None means the data set of the loader.

    If the loader has a ``SubsetRandomSampler`` or a ``DistributedSampler``, the data
    are the examples chosen by the sampler, in the order of the data set.

    Attributes:
        batch_size: the batch size of the loader or of its batch sampler. If neither has
            a batch size, it is the number of examples.

    Raises:
        DataError: a data set has no length or no indices, ``plain`` has another length,
            or the sampler does not choose examples by a fixed list.
    """

    def __init__(self, loader: Any, plain: Any = None) -> None:
        self._data = loader.dataset
        plain = self._data if plain is None else plain
        for data in (self._data, plain):
            _refuse_without_positions(data)
        if len(plain) != len(self._data):
            raise DataError(
                f"the data set without random transforms has {len(plain)} examples, but"
                f" the training data set has {len(self._data)}. Both must contain the"
                " same examples in the same order."
            )
        self._plain = plain
        chosen = _chosen(loader)
        if chosen is not None:
            self._data, plain = Subset(self._data, chosen), Subset(plain, chosen)
        self._loader = loader
        self._read = reader(self._data, loader.collate_fn)
        self._read_plain = reader(plain, loader.collate_fn)
        self.batch_size: int = first_batch(loader) or len(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Any, Tensor]:
        """Return a batch, see ``training.batches.Batches``.

        If a generator is given, it gives the seed of random transforms.

        Raises:
            DataError: the examples are not pairs, they cannot be stacked, or the batch
                has another number of examples.
        """
        [batch] = self.batches([positions], generator)
        return batch

    def batches(
        self, positions: Iterable[Tensor], generator: torch.Generator | None = None
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield ``batch`` of each of the positions.

        The workers of the loader read in advance. The bits do not depend on their
        number if the data set draws only from the default generators.

        Raises:
            DataError: as in ``batch``.
        """
        read, data = self._read, self._loader.dataset
        if generator is None:
            read, data = self._read_plain, self._plain
        order = [each.tolist() for each in positions]
        batches = read_ahead(read, order, generator, self._loader, data)
        # Close the batches here, because they may have workers.
        with closing(batches):
            for chosen, batch in zip(order, batches, strict=True):
                yield self._checked(batch, len(chosen))

    def _checked(self, batch: Any, size: int) -> tuple[Any, Tensor]:
        """Return the inputs and targets of ``size`` examples."""
        inputs, targets = _pair(name_of(self._data), batch)
        if isinstance(targets, Tensor) and targets.shape[:1] != (size,):
            raise DataError(
                f"{name_of(self._data)}: a batch has targets of shape"
                f" {tuple(targets.shape)} for {size} examples. The collate_fn and"
                " __getitems__ must keep all examples, in their order. To drop examples,"
                " remove them from the data set."
            )
        return inputs, targets


def _refuse_without_positions(data: Any) -> None:
    is_map = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, IterableDataset) or not is_map:
        raise DataError(
            f"the data set, {type(data).__name__}, has no length or no indices. A pass"
            " in a fixed order needs both: use a torch Dataset, not an IterableDataset"
            " or a DataLoader."
        )


def _pair(name: str, batch: Any) -> tuple[Any, Any]:
    """Return the inputs and targets of a batch of the data set with this name.

    Raises:
        DataError: the batch is not a pair.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    parts = ""
    if isinstance(batch, Mapping):
        parts = f" of {', '.join(map(str, batch))}"
    elif isinstance(batch, (tuple, list)):
        parts = f" of length {len(batch)}"
    raise DataError(
        f"a batch of {name} is a {type(batch).__name__}{parts}, but it must be a"
        " pair (inputs, targets); the inputs may have several parts. Return pairs"
        " from a data set that wraps this data set, or from the collate_fn of a loader"
        " (in a TorchClient: fedbn_flwr.training.batches_of(loader))."
    )


def batches_of(loader: Any, plain: Dataset[Any] | None = None) -> Batches:
    """Return the data set of a ``DataLoader`` as ``Batches``.

    The batches are assembled by its ``collate_fn``. The workers of the loader
    (``num_workers``) read in advance. The bits do not depend on their number if the
    data set draws only from the default generators of torch, NumPy and Python. A single
    batch is read without workers.

    Args:
        loader: its batch size and order are ignored, because the client's settings
            define them. If its sampler chooses examples, only these are the data.
        plain: the same examples in the same order without random transforms. None means
            the data set of the loader.

    Raises:
        DataError: as in ``LoadedBatches``.
    """
    return LoadedBatches(loader, plain)


def num_examples(loader: Any) -> int:
    """Return the number of examples in an epoch of a loader.

    Raises:
        DataError: the data set has no length, or the sampler does not choose examples
            by a fixed list.
    """
    chosen = _chosen(loader)
    if chosen is not None:
        return len(chosen)
    if not hasattr(loader.dataset, "__len__"):
        raise DataError(
            f"the data set, {type(loader.dataset).__name__}, has no length. Give it a"
            " method __len__."
        )
    return len(loader.dataset)


def first_batch(loader: Any) -> int:
    """Return the batch size of a loader or its batch sampler, or 0 without one."""
    # with a user's batch sampler, the batch size of torch's loader is None
    if loader.batch_size:
        return int(loader.batch_size)
    sampler = getattr(loader, "batch_sampler", None)
    return getattr(sampler, "batch_size", None) or 0


def _chosen(loader: Any) -> list[int] | None:
    """Return the ascending positions chosen by a loader's sampler, or None for all.

    Raises:
        DataError: a pass in a fixed order cannot reproduce the choice.
    """
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        sampler = getattr(loader, "sampler", None)
    else:
        # A loader with a custom batch sampler also has a SequentialSampler, but never
        # uses it.
        sampler = getattr(batches, "sampler", batches)
    if sampler is None:
        return None
    # Ask for exact types, because a subclass may choose other examples.
    if type(sampler) is SubsetRandomSampler:
        # A pass would draw from the generator of the sampler. Its indices may be an
        # array or a tensor.
        return sorted(map(index, sampler.indices))
    if type(sampler) is DistributedSampler:
        return sorted(map(index, set(sampler)))
    # A SequentialSampler uses all examples in an epoch. A RandomSampler does so unless
    # it is set to draw fewer or more.
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else -1
    if type(sampler) in (SequentialSampler, RandomSampler) and len(sampler) == size:
        return None
    raise DataError(
        f"{name_of(loader.dataset)}: the loader's sampler, {type(sampler).__name__},"
        " chooses examples in a way that a pass in a fixed order cannot reproduce."
        " Choose a client's examples with torch.utils.data.Subset, and use a loader"
        " without this sampler."
    )

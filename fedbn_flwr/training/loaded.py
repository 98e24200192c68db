"""A torch ``Dataset`` or the data set of a ``DataLoader`` as the ``Batches`` of
training and evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from fedbn_flwr.training.batches import Batches, map_inputs
from fedbn_flwr.training.randomness import drawing_from
from fedbn_flwr.training.reading import draws_nothing, name_of, reader

__all__ = ["LoadedBatches", "batches_of", "first_batch", "num_examples"]


class LoadedBatches:
    """The data set of a ``DataLoader`` as ``Batches``.

    Args:
        loader: the ``DataLoader``.
        plain: the same examples in the same order without random transforms, taken
            where no generator is given. None = the loader's own.

    A ``SubsetRandomSampler`` or a ``DistributedSampler`` chooses examples: these are
    the data then, in their order.

    Attributes:
        batch_size: that of the loader or of its batch sampler; if neither has one, the
            number of examples.

    Raises:
        DataError: the data set has no length, or ``plain`` has another one; the sampler
            chooses in another way.
    """

    def __init__(self, loader: Any, plain: Any = None) -> None:
        self._data = loader.dataset
        plain = self._data if plain is None else plain
        for data in (self._data, plain):
            _refuse_without_positions(data)
        if len(plain) != len(self._data):
            raise DataError(
                f"the data set without random transforms has {len(plain)}"
                f" examples, the one that is trained on {len(self._data)}: they must be"
                " the same examples in the same order"
            )
        chosen = _chosen(loader)
        if chosen is not None:
            self._data, plain = Subset(self._data, chosen), Subset(plain, chosen)
        self._read = reader(self._data, loader.collate_fn)
        self._read_plain = reader(plain, loader.collate_fn)
        self.batch_size: int = first_batch(loader) or len(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Any, Tensor]:
        """See ``training.batches.Batches``; with a generator random transforms draw
        from it.

        Raises:
            DataError: the examples are something else than pairs, cannot be stacked, or
                are not as many in the batch.
        """
        # A batch of no example has the shapes of one.
        chosen = positions.tolist() or [0]
        read = self._read_plain if generator is None else self._read
        if generator is None or draws_nothing(read):
            batch = read(chosen)
        else:
            # Users' transforms draw from the default generators of torch, NumPy, Python.
            with drawing_from(generator):
                batch = read(chosen)
        inputs, targets = _pair(batch)
        if isinstance(targets, Tensor) and targets.shape[:1] != (len(chosen),):
            raise DataError(
                f"{name_of(self._data)}: the collate_fn makes targets of shape"
                f" {tuple(targets.shape)} of {len(chosen)} examples: it must keep each"
                " of them, in their order. Leave examples out of the data set instead."
            )
        if not len(positions):
            return map_inputs(lambda part: part[:0], inputs), targets[:0]
        return inputs, targets


def _refuse_without_positions(data: Any) -> None:
    is_map = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, IterableDataset) or not is_map:
        raise DataError(
            f"the data set, {type(data).__name__}, has no length and no"
            " indices: a pass in a fixed order needs both (a torch Dataset,"
            " not an IterableDataset, and not a DataLoader)"
        )


def _pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch.

    Raises:
        DataError: it is something else than a pair.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    keys = ""
    if isinstance(batch, Mapping):
        keys = f" of {', '.join(map(str, batch))}"
    raise DataError(
        f"the data set's batches are {type(batch).__name__}{keys}; (inputs,"
        " targets) are needed. Let the examples be such pairs, where the input"
        " may have several parts, e.g. by a data set around it, or by the"
        " collate_fn of a loader (in a TorchClient"
        " fedbn_flwr.training.batches_of(loader))."
    )


def batches_of(loader: Any, plain: Dataset[Any] | None = None) -> Batches:
    """Return the data set of a ``DataLoader`` as ``Batches``, put together by its
    ``collate_fn``.

    Args:
        loader: its batch size and order are not used: a client's settings have them.
            Examples that a sampler chooses are the data.
        plain: the same examples in the same order without random transforms; None = the
            loader's own.

    Raises:
        DataError: the data set has no length, or ``plain`` has another one; the sampler
            chooses in another way than by a fixed list.
    """
    return LoadedBatches(loader, plain)


def num_examples(loader: Any) -> int:
    """Return the number of examples that a loader gives in an epoch; raises DataError
    as ``LoadedBatches`` does.
    """
    chosen = _chosen(loader)
    if chosen is not None:
        return len(chosen)
    if not hasattr(loader.dataset, "__len__"):
        raise DataError(f"the data set, {type(loader.dataset).__name__}, has no length")
    return len(loader.dataset)


def first_batch(loader: Any) -> int:
    """Return the batch size of a loader or of its batch sampler; 0 if neither has one."""
    # torch's loader has None besides a batch sampler of the user's
    if loader.batch_size:
        return int(loader.batch_size)
    sampler = getattr(loader, "batch_sampler", None)
    return getattr(sampler, "batch_size", None) or 0


def _chosen(loader: Any) -> list[int] | None:
    """Return the positions that the loader's sampler chooses, in their order; None for
    all.

    Raises:
        DataError: it draws them in a way that a pass in a fixed order cannot follow.
    """
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        sampler = getattr(loader, "sampler", None)
    else:
        # Besides a batch sampler of one's own the loader's sampler is a
        # SequentialSampler that it never asks.
        sampler = getattr(batches, "sampler", batches)
    if sampler is None:
        return None
    if isinstance(sampler, (SubsetRandomSampler, DistributedSampler)):
        return sorted(getattr(sampler, "indices", None) or set(sampler))
    # In order or shuffled, an epoch has all examples; but a RandomSampler may draw a
    # number of them.
    in_order = isinstance(sampler, (SequentialSampler, RandomSampler))
    if in_order and len(sampler) == _size(loader):
        return None
    raise DataError(
        f"{name_of(loader.dataset)}: the loader's sampler, {type(sampler).__name__},"
        " chooses examples in a way that a pass in a fixed order cannot follow: choose"
        " a client's examples by torch.utils.data.Subset, and give here a loader"
        " without it"
    )


def _size(loader: Any) -> int:
    return len(loader.dataset) if hasattr(loader.dataset, "__len__") else -1

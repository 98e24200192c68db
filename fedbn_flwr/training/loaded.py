"""A torch ``Dataset`` or the data set of a ``DataLoader`` as the ``Batches`` of training and evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fedbn_flwr.errors import DataError
from fedbn_flwr.training.loop import Batches
from fedbn_flwr.training.randomness import drawing_from

__all__ = ["LoadedBatches", "as_batches"]


class LoadedBatches:
    """The data set of a ``DataLoader`` as ``Batches``.

    Attributes:
        batch_size: that of the loader or of its batch sampler; if neither has one, the number of examples.

    Raises:
        DataError: the data set has no length.
    """

    def __init__(self, loader: Any) -> None:
        self._data, self._collate = loader.dataset, loader.collate_fn
        if isinstance(self._data, IterableDataset) or not hasattr(self._data, "__len__"):
            raise DataError(
                f"the data set, {type(self._data).__name__}, has no length: a pass in a fixed order needs one "
                "with indices and a length (a torch Dataset, not an IterableDataset)"
            )
        self.batch_size: int = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or len(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """See ``training.loop.Batches``; with a generator random transforms draw from it.

        Raises:
            DataError: the examples are something else than pairs.
        """
        chosen = positions.tolist()
        with nullcontext() if generator is None else drawing_from(generator):
            batch = self._collate([self._data[number] for number in chosen or [0]])
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            keys = f" of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
            raise DataError(
                f"the data set's batches are {type(batch).__name__}{keys}; (inputs, targets) are needed. "
                "Let the examples be such pairs, e.g. by a data set around it, or by the collate_fn of a loader."
            )
        inputs, targets = batch
        return (inputs, targets) if chosen else (inputs[:0], targets[:0])


def as_batches(data: Any) -> Batches:
    """Return ``Batches`` as they are, and a torch ``Dataset`` of pairs as such, collated as a ``DataLoader`` does.

    Raises:
        DataError: the data set has no length; it is a ``DataLoader``, whose batches are not those of the settings.
    """
    if _has_batches(data):
        batches: Batches = data
        return batches
    if isinstance(data, DataLoader):
        raise DataError(
            f"a DataLoader with batch_size={data.batch_size}: batches and their order are those of the client's "
            "settings (LocalTraining). Give its data set, loader.dataset."
        )
    if not hasattr(data, "__getitem__"):
        raise DataError(
            f"{type(data).__name__} is no data set: give a torch Dataset with a length whose examples are (input, "
            "target), or an object with a length and batch(positions, generator)"
        )
    return LoadedBatches(DataLoader(data))


def _has_batches(data: Any) -> bool:
    """Return whether an object has the method of ``Batches``; data sets of other libraries have another ``batch``."""
    method = getattr(data, "batch", None)
    return callable(method) and (
        not hasattr(data, "__getitem__") or "generator" in inspect.signature(method).parameters
    )

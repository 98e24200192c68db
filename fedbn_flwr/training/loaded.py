"""A torch ``Dataset`` or the data set of a ``DataLoader`` as the ``Batches`` of training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fedbn_flwr.errors import DataError
from fedbn_flwr.training.loop import Batches

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
        if not hasattr(self._data, "__len__"):
            raise DataError(
                f"the data set, {type(self._data).__name__}, has no length: a pass in a fixed order needs one "
                "with indices and a length (a torch Dataset, not an IterableDataset)"
            )
        self.batch_size: int = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or len(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """See ``training.loop.Batches``; the data set may augment by itself.

        Raises:
            DataError: the loader makes something else of the examples than a pair.
        """
        batch = self._collate([self._data[int(i)] for i in positions])
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            keys = f" of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
            raise DataError(
                f"the data set's batches are {type(batch).__name__}{keys}; (inputs, targets) are needed. "
                "Let the examples be such pairs, or give the loader a collate_fn that returns them."
            )
        inputs, targets = batch
        return inputs, targets


def as_batches(data: Any) -> Batches:
    """Return ``Batches`` as they are, and a torch ``Dataset`` of pairs as such, collated as a ``DataLoader`` does.

    Raises:
        DataError: the data set has no length; it is a ``DataLoader``, whose batches are not those of the settings.
    """
    if hasattr(data, "batch"):
        batches: Batches = data
        return batches
    if isinstance(data, DataLoader):
        raise DataError(
            f"a DataLoader with batch_size={data.batch_size}: batches and their order are those of the client's "
            "settings (LocalTraining). Give its data set, loader.dataset."
        )
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise DataError(
            f"{type(data).__name__} is no data set: give a torch Dataset with a length whose examples are (input, "
            "target), or an object with a length and batch(positions, generator)"
        )
    return LoadedBatches(DataLoader(data))

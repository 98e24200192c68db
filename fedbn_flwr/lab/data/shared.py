"""Data sets that a process takes from another one, in place of files on its own disk.

In a run on several machines one process reads the data; the others ``adopt`` what it packed, and read no file.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.dataset import Dataset
from fedbn_flwr.lab.data.own.request import OwnData
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.registry import DatasetInfo
from fedbn_flwr.lab.data.samples import Samples
from fedbn_flwr.lab.data.shapes import Shape

__all__ = ["DataKey", "PackedDataset", "adopt", "adopted", "in_memory", "pack"]

DataKey = tuple[str | OwnData, str]
"""What names a data set: the config's ``dataset``, or what it says of own data; and ``data-dir``."""

_Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class PackedDataset:
    """A data set as NumPy arrays, which Ray shares between the processes of a machine without a copy.

    Attributes:
        shape: (C, H, W) of images; () of other examples, which have one shape.
        channels: images that are grey are packed once and stand for so many channels.
        train: inputs, targets, groups and units of the training examples, as far as they have them.
        test: those of the test examples.
        group_names: see ``Dataset``.
    """

    shape: tuple[int, ...]
    train: _Arrays
    test: _Arrays
    group_names: tuple[str, ...]


_PACKED: dict[tuple[DataKey, tuple[int, ...]], Callable[[], PackedDataset]] = {}
_INFOS: dict[DataKey, DatasetInfo] = {}


def in_memory(data: Dataset) -> bool:
    """Return whether all examples are in memory, none in files that stay on the disk."""
    return data.train.in_memory and data.test.in_memory


def pack(data: Dataset) -> PackedDataset | None:
    """Return a data set for other processes; None unless it is ``in_memory``."""
    if not in_memory(data):
        return None
    shape = data.train.shape if data.train.as_bytes else ()
    return PackedDataset(shape, _arrays(data.train), _arrays(data.test), data.group_names)


def adopt(key: DataKey, info: DatasetInfo, shape: tuple[int, ...], fetch: Callable[[], PackedDataset]) -> None:
    """Take the data set with this key from ``fetch`` from now on, in this process.

    Args:
        key: what names the data set in a config.
        info: its description.
        shape: that of the packed data set. One data set can be there in several shapes.
        fetch: called when the data set is loaded.
    """
    _PACKED[key, shape] = fetch
    _INFOS.setdefault(key, replace(info, loader=functools.partial(_load, key), shared=True))


def adopted(key: DataKey) -> DatasetInfo | None:
    """Return the description of a data set that this process has adopted, else None."""
    return _INFOS.get(key)


def _load(key: DataKey, folder: Path, shape: Shape) -> Loaded:
    """Return an adopted data set: a reader of ``data.loading``."""
    del folder
    fetch = _PACKED.get((key, ())) or _PACKED.get((key, (shape.channels, shape.height, shape.width)))
    if fetch is None:
        raise DataError(f"data set {key[0]!r} was not shared in the shape {shape}")
    packed = fetch()
    channels = packed.shape[0] if packed.shape else 0
    return Loaded(_samples(packed.train, channels), _samples(packed.test, channels), packed.group_names)


def _arrays(samples: Samples) -> _Arrays:
    inputs = samples.inputs
    if samples.as_bytes and inputs.shape[1] > 1 and inputs.stride(1) == 0:
        inputs = inputs[:, :1]  # grey, repeated over the channels without a copy
    parts = {"inputs": inputs, "targets": samples.targets, "groups": samples.groups, "units": samples.units}
    return {name: part.cpu().contiguous().numpy() for name, part in parts.items() if part is not None}


def _samples(arrays: _Arrays, channels: int) -> Samples:
    parts = {name: _tensor(array) for name, array in arrays.items()}
    inputs = parts.pop("inputs")
    return Samples(inputs.expand(-1, channels, -1, -1) if channels else inputs, **parts)


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the array is read-only, and nobody writes into examples
        return torch.from_numpy(array)

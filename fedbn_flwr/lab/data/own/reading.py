"""Own data, read once in a process and divided into training and test examples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.image_files import hold
from fedbn_flwr.lab.data.own.arrays import read_arrays
from fedbn_flwr.lab.data.own.folder import read_folder
from fedbn_flwr.lab.data.own.found import Found
from fedbn_flwr.lab.data.own.hub import read_hub
from fedbn_flwr.lab.data.own.request import OwnData
from fedbn_flwr.lab.data.own.table import read_table
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.samples import Examples, Samples
from fedbn_flwr.lab.data.shapes import Shape
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.data.validation import split_off

__all__ = ["load", "parts_of", "read", "stamp_of"]

_READERS: dict[str, Callable[[OwnData], Found]] = {
    "folder": read_folder,
    "npz": read_arrays,
    "csv": read_table,
    "hf": read_hub,
}
_TEST_SEED = 0  # all runs and seeds have the same test examples


@functools.lru_cache(maxsize=8)
def read(request: OwnData, stamp: tuple[int, ...]) -> Found:
    """Return what the reader of the data's kind finds; data with another stamp are read again.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    del stamp  # only part of the cache key
    return _READERS[request.kind](request)


def stamp_of(request: OwnData) -> tuple[int, ...]:
    """Return times and sizes of a file, or of a folder and what is in it, so that a process notices other data."""
    path = Path(request.path)
    try:
        inside = sorted(path.iterdir()) if path.is_dir() else []
        found = [path.stat(), *(one.stat() for one in inside)]
    except OSError:
        return ()
    return tuple(number for one in found for number in (one.st_mtime_ns, one.st_size))


def load(request: OwnData, stamp: tuple[int, ...], folder: Path, shape: Shape) -> Loaded:
    """Return the training and the test examples: a reader of ``data.loading``."""
    del folder
    found = read(request, stamp)
    parts = parts_of(request, found)
    train, test = (
        samples.regrouped(_numbers(found.clients, part), _numbers(found.units, part))
        for samples, part in zip(_examples(found, parts, shape), parts, strict=True)
    )
    return Loaded(train, test, found.client_names)


def _numbers(numbers: Indices | None, part: Indices) -> Tensor | None:
    return None if numbers is None else torch.from_numpy(numbers[part])


def _examples(found: Found, parts: Sequence[Indices], shape: Shape) -> list[Examples]:
    """Return the examples of each part: arrays in memory as they are, image files in this shape."""
    inputs, targets = found.inputs.values, found.targets.values
    if isinstance(inputs, Tensor):
        if not isinstance(targets, Tensor):
            raise TypeError("arrays have arrays of targets")
        return [Samples(inputs[part], targets[part]) for part in map(torch.from_numpy, parts)]
    order = np.concatenate(parts).tolist()
    masks = () if isinstance(targets, Tensor) else [targets[at] for at in order]
    labels = targets[order].tolist() if isinstance(targets, Tensor) else [0] * len(order)
    paths = [inputs[at] for at in order]
    return hold(paths, labels, [len(part) for part in parts], shape, masks=masks, checked=True)


def parts_of(request: OwnData, found: Found) -> tuple[Indices, Indices]:
    """Return the numbers of the training and of the test examples.

    Raises:
        ConfigError: the units of one patient are on both sides of the split that the data have.
    """
    everything = np.arange(len(found), dtype=np.int64)
    if found.tests is not None:
        both = () if found.units is None else np.intersect1d(found.units[found.tests], found.units[~found.tests])
        if len(both):
            raise ConfigError(
                f"dataset={request.name!r}: {len(both)} values of the group column are on both sides of the split "
                "that the data have. Correct the split, or leave split-column out: then a split by group is made."
            )
        return everything[~found.tests], everything[found.tests]
    targets = found.targets.values
    by_class = isinstance(targets, Tensor) and targets.dtype == torch.int64
    cells = targets.numpy() if by_class and isinstance(targets, Tensor) else np.zeros(len(found), np.int64)
    if found.clients is not None:  # every client has its share of test examples
        cells = cells * len(found.client_names) + found.clients
    return split_off(everything, cells, request.test_share, _TEST_SEED, found.units)

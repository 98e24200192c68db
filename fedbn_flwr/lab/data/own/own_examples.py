"""Own data, read once in a process and divided into training and test examples."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.image_files import open_images
from fedbn_flwr.lab.data.own.arrays import read_arrays
from fedbn_flwr.lab.data.own.class_folders import read_folder
from fedbn_flwr.lab.data.own.function import function_sha256
from fedbn_flwr.lab.data.own.own_records import Records
from fedbn_flwr.lab.data.own.request import FUNCTION, OwnData
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.samples import Samples, Shape
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.data.validation import split_off

logger = logging.getLogger("flwr")

__all__ = ["is_divided", "load", "own_sha256", "own_tests", "read", "stamp_of"]

_READERS: dict[str, Callable[[OwnData], Records]] = {
    "folder": read_folder,
    "npz": read_arrays,
}
# All runs and seeds have the same test examples.
_TEST_SEED = 0


@functools.lru_cache(maxsize=8)
def read(request: OwnData, stamp: tuple[int, ...]) -> Records:
    """Return what the reader of the data's kind finds, once for each ``stamp_of``.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    # Only a part of the cache's key.
    del stamp
    return _READERS[request.kind](request)


def stamp_of(request: OwnData) -> tuple[int, ...]:
    """Return times and sizes of a file, or of a folder and what is directly in it.

    With another stamp a process reads the data again.
    """
    path = Path(request.path)
    stamp = list[int]()
    try:
        paths = [path]
        if path.is_dir():
            paths += sorted(path.iterdir())
        for each in paths:
            stamp += [each.stat().st_mtime_ns, each.stat().st_size]
    # The reader says better what is absent.
    except OSError:
        return ()
    return tuple(stamp)


def load(
    request: OwnData, stamp: tuple[int, ...], folder: Path, shape: Shape
) -> Loaded:
    """Return the training and the test examples: ``DatasetInfo.loader`` of own data."""
    # Own data name their path.
    del folder
    records = read(request, stamp)
    if not request.image_size and len(set(records.sizes)) > 1:
        _tell_sizes(request, records.sizes, shape)
    parts = parts_of(request, records)
    both = []
    for samples, part in zip(_examples(records, parts, shape), parts, strict=True):
        clients = _numbers(records.clients, part)
        both.append(samples.regrouped(clients, _numbers(records.units, part)))
    return Loaded(both[0], both[1], records.client_names)


def _tell_sizes(
    request: OwnData, sizes: Sequence[tuple[int, int]], shape: Shape
) -> None:
    """Warn of images of several sizes, which all become one."""
    by_area = sorted(sizes, key=math.prod)
    (least_wide, least_high), (most_wide, most_high) = by_area[0], by_area[-1]
    logger.warning(
        "dataset=%r: its images have several sizes, from %dx%d to %dx%d (width x"
        " height): each becomes %dx%d, by their median height and the limits of"
        " the model. Set image-size for another height.",
        request.name,
        least_wide,
        least_high,
        most_wide,
        most_high,
        shape.width,
        shape.height,
    )


def _numbers(numbers: Indices | None, part: Indices) -> Tensor | None:
    return None if numbers is None else torch.from_numpy(numbers[part])


def _examples(
    records: Records, parts: Sequence[Indices], shape: Shape
) -> Sequence[Samples]:
    """Return the examples of each part; image files are decoded in this shape."""
    inputs, targets = records.inputs, records.targets
    if isinstance(inputs, Tensor):
        return [Samples(inputs[part], targets[part]) for part in parts]
    # Together, so that what fits into memory is decided for both parts at once.
    order = np.concatenate(parts)
    paths = [inputs[at] for at in order.tolist()]
    lengths = [len(part) for part in parts]
    return open_images(paths, targets[order].tolist(), lengths, shape)


def parts_of(request: OwnData, records: Records) -> tuple[Indices, Indices]:
    """Return the numbers of the training and of the test examples.

    Raises:
        ConfigError: the units of one patient are on both sides of the split that the
            data have.
    """
    everything, tests = np.arange(len(records), dtype=np.int64), records.tests
    # The data say it themselves.
    if tests is not None:
        if records.units is not None:
            both = np.intersect1d(records.units[tests], records.units[~tests])
            if len(both):
                raise ConfigError(
                    f"dataset={request.name!r}: {len(both)} values of group are on both"
                    " sides of the split that the data have. Correct the split, or"
                    " leave it out: then a split by group is made."
                )
        return everything[~tests], everything[tests]
    if request.test_share == 1:
        return everything[:0], everything
    # Else a share of each class of each client: the cells of this draw.
    cells = np.zeros(len(records), np.int64)
    if records.targets.dtype == torch.int64:
        cells = records.targets.numpy()
    if records.clients is not None:
        cells = cells * len(records.client_names) + records.clients
    return split_off(everything, cells, request.test_share, _TEST_SEED, records.units)


def is_divided(request: OwnData) -> bool:
    """Return whether the data themselves say which are test examples."""
    # A function is asked for each part.
    if request.kind == FUNCTION:
        return True
    return read(request, stamp_of(request)).tests is not None


def own_tests(request: OwnData) -> dict[str, list[int | str]]:
    """Return the file or row, the client and the group of each test example.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    records = read(request, stamp_of(request))
    _, tests = parts_of(request, records)
    if isinstance(records.inputs, Tensor):
        columns: dict[str, list[int | str]] = {"row": tests.tolist()}
    else:
        names = _relative(request, records.inputs)
        columns = {"file": [names[at] for at in tests]}
    if records.clients is not None:
        columns["client"] = [records.client_names[at] for at in records.clients[tests]]
    if records.units is not None:
        columns["group"] = [records.unit_names[at] for at in records.units[tests]]
    return columns


def _relative(request: OwnData, paths: Sequence[Path]) -> list[str]:
    return [path.relative_to(request.path).as_posix() for path in paths]


def own_sha256(request: OwnData) -> str:
    """Return the SHA-256 of the examples in their order, and of who has and tests them.

    The division into training and test examples counts, and the clients that the data
    name. Image files count by their paths and sizes, the data of a function by its file
    and what the data sets say without reading an example.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    if request.kind == FUNCTION:
        return function_sha256(request)
    return _sha256(request, stamp_of(request))


@functools.lru_cache(maxsize=8)
def _sha256(request: OwnData, stamp: tuple[int, ...]) -> str:
    # Runs have this digest in data.json: another order of the entries would look as if
    # the data had changed.
    records, digest = read(request, stamp), hashlib.sha256()
    if isinstance(records.inputs, Tensor):
        digest.update(records.inputs.contiguous().numpy().tobytes())
    else:
        lines = []
        names = _relative(request, records.inputs)
        for name, path in zip(names, records.inputs, strict=True):
            lines.append(f"{name} {path.stat().st_size}")
        digest.update("\n".join(lines).encode())
    digest.update(records.targets.contiguous().numpy().tobytes())
    for rows in parts_of(request, records):
        digest.update(rows.tobytes())
    if records.clients is not None:
        digest.update(records.clients.tobytes())
    digest.update("\n".join(records.client_names).encode())
    return digest.hexdigest()

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
from fedbn_flwr.messages.site_names import fault_of_list

logger = logging.getLogger("flwr")

_READERS: dict[str, Callable[[OwnData], Records]] = {
    "folder": read_folder,
    "npz": read_arrays,
}
# a fixed seed, so that all runs have the same test examples
_TEST_SEED = 0


@functools.lru_cache(maxsize=8)
def read_own_examples(request: OwnData, stamp: tuple[int, ...]) -> Records:
    """Return the records of own data, read again only if the stamp differs.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    # The stamp only makes the cache read changed files again.
    del stamp
    records = _READERS[request.kind](request)
    fault = fault_of_list(records.client_names)
    if fault:
        raise request.problem(f"a client has no usable name: {fault}")
    return records


def stamp_of(request: OwnData) -> tuple[int, ...]:
    """Return the stamp of own data: times and sizes of a file, or of a folder.

    The stamp of a folder includes the direct entries of the folder. If the stamp
    differs, a process reads the data again. The stamp is empty if a file is absent.
    """
    path = Path(request.path)
    stamp = list[int]()
    try:
        paths = [path]
        if path.is_dir():
            paths += sorted(path.iterdir())
        for each in paths:
            stamp += [each.stat().st_mtime_ns, each.stat().st_size]
    # If a file is absent, return an empty stamp, because the reader then gives a better
    # message.
    except OSError:
        return ()
    return tuple(stamp)


def load(
    request: OwnData, stamp: tuple[int, ...], folder: Path, shape: Shape
) -> Loaded:
    """Return the training and the test examples, see ``DatasetInfo.loader``."""
    # ``folder`` is the folder of registered data sets. Own data have their own path.
    del folder
    records = read_own_examples(request, stamp)
    if not request.image_size and len(set(records.sizes)) > 1:
        _warn_of_sizes(request, records.sizes, shape)
    parts = parts_of(request, records)
    both = []
    for samples, part in zip(_examples(records, parts, shape), parts, strict=True):
        clients = _numbers(records.clients, part)
        both.append(samples.regrouped(clients, _numbers(records.units, part)))
    return Loaded(both[0], both[1], records.client_names)


def _warn_of_sizes(
    request: OwnData, sizes: Sequence[tuple[int, int]], shape: Shape
) -> None:
    """Warn if images have several sizes, because all are resized to one size."""
    by_area = sorted(sizes, key=math.prod)
    (least_wide, least_high), (most_wide, most_high) = by_area[0], by_area[-1]
    logger.warning(
        "dataset=%r: its images have several sizes, from %dx%d to %dx%d (width x"
        " height). Each becomes %dx%d, by their median height and the limits of"
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
    """Return the examples of each part, with image files decoded in this shape."""
    inputs, targets = records.inputs, records.targets
    if isinstance(inputs, Tensor):
        return [Samples(inputs[part], targets[part]) for part in parts]
    # Open the images of both parts in one call, because their total size determines
    # whether they fit into memory.
    order = np.concatenate(parts)
    paths = [inputs[at] for at in order.tolist()]
    lengths = [len(part) for part in parts]
    return open_images(paths, targets[order].tolist(), lengths, shape)


def parts_of(request: OwnData, records: Records) -> tuple[Indices, Indices]:
    """Return the numbers of the training and of the test examples.

    Raises:
        ConfigError: the data's own split has examples of one unit on both sides.
    """
    everything, tests = np.arange(len(records), dtype=np.int64), records.tests
    # Use the data's own split into training and test, if there is one.
    if tests is not None:
        if records.units is not None:
            both = np.intersect1d(records.units[tests], records.units[~tests])
            if len(both):
                raise ConfigError(
                    f"dataset={request.name!r}: {len(both)} of the values of group are"
                    " on both sides of the data's own split, training and test. Correct"
                    " the split, or remove it; then a split by group is made."
                )
        return everything[~tests], everything[tests]
    if request.test_share == 1:
        return everything[:0], everything
    # Otherwise draw a share of the examples of each cell. A cell is a class of a
    # client.
    cells = np.zeros(len(records), np.int64)
    if records.targets.dtype == torch.int64:
        cells = records.targets.numpy()
    if records.clients is not None:
        cells = cells * len(records.client_names) + records.clients
    return split_off(everything, cells, request.test_share, _TEST_SEED, records.units)


def is_divided(request: OwnData) -> bool:
    """Return whether the data themselves determine the test examples."""
    # A user's function returns training and test examples in separate calls.
    if request.kind == FUNCTION:
        return True
    return read_own_examples(request, stamp_of(request)).tests is not None


def own_tests(request: OwnData) -> dict[str, list[int | str]]:
    """Return the file or row of each test example, and its client and group, if any.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    records = read_own_examples(request, stamp_of(request))
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
    """Return the SHA-256 of own data, to notice changes.

    It depends on the examples and their order, their division into training and test
    examples, and the clients that the data name. Of image files, only paths and sizes
    are used. For a function, see ``function_sha256``.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    if request.kind == FUNCTION:
        return function_sha256(request)
    return _sha256(request, stamp_of(request))


@functools.lru_cache(maxsize=8)
def _sha256(request: OwnData, stamp: tuple[int, ...]) -> str:
    # Do not change the order of the entries, because runs save this digest in
    # data.json: unchanged data would look changed.
    records, digest = read_own_examples(request, stamp), hashlib.sha256()
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

"""The examples of own data in the user's files: where they are, and a hash of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from fedbn_flwr.lab.data.own.reading import parts_of, read, stamp_of
from fedbn_flwr.lab.data.own.request import OwnData
from fedbn_flwr.lab.data.splits import Indices

__all__ = ["OwnRows", "own_rows", "own_sha256"]


@dataclass(frozen=True, eq=False)
class OwnRows:
    """Where the examples are in the user's files.

    Attributes:
        column: "file" for image files, else "row".
        names: of all rows in their order: paths below the folder, numbers from 0, or TABLE:NUMBER.
        train: the row of each training example.
        test: the row of each test example.
        divided: whether the data themselves say which are test examples.
    """

    column: str
    names: Sequence[int | str]
    train: Indices
    test: Indices
    divided: bool


def own_rows(request: OwnData) -> OwnRows:
    """Return where the training and test examples of own data are in the files.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    found = read(request, stamp_of(request))
    column, names = "row", list[int | str](range(len(found)))
    inputs = found.inputs.values
    if not isinstance(inputs, Tensor):
        column, names = "file", [path.relative_to(request.path).as_posix() for path in inputs]
    elif request.kind == "csv" and Path(request.path).is_dir() and found.clients is not None:
        starts = np.unique(found.clients, return_index=True)[1]  # the tables follow one another, in any order
        names = [f"{found.client_names[c]}:{at - starts[c]}" for at, c in enumerate(found.clients)]
    return OwnRows(column, names, *parts_of(request, found), found.tests is not None)


def own_sha256(request: OwnData) -> str:
    """Return the SHA-256 of the examples in their order and of the division into training and test examples.

    The clients that the data name count, too. Image files count by their paths and sizes.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    return _sha256(request, stamp_of(request))


@functools.lru_cache(maxsize=8)
def _sha256(request: OwnData, stamp: tuple[int, ...]) -> str:
    found, digest = read(request, stamp), hashlib.sha256()
    for part in (found.inputs.values, found.targets.values):
        if isinstance(part, Tensor):
            digest.update(part.contiguous().numpy().tobytes())
        else:
            files = [f"{path.relative_to(request.path).as_posix()} {path.stat().st_size}" for path in part]
            digest.update("\n".join(files).encode())
    for rows in (*parts_of(request, found), *(() if found.clients is None else (found.clients,))):
        digest.update(rows.tobytes())
    digest.update("\n".join(found.client_names).encode())
    return digest.hexdigest()

"""Own data without code: ``dataset=folder:PATH``, ``npz:PATH``, ``csv:PATH`` or ``hf:NAME``."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.data.image_files import hold
from fedbn_flwr.data.own.arrays import read_arrays
from fedbn_flwr.data.own.features import stated_features
from fedbn_flwr.data.own.folder import read_folder
from fedbn_flwr.data.own.hub import read_hub
from fedbn_flwr.data.own.request import KINDS, Found, OwnData, chosen_task, is_own, warning_of_gaps
from fedbn_flwr.data.own.table import read_table, table_columns
from fedbn_flwr.data.readers import Loaded
from fedbn_flwr.data.registry import IMAGENET, DatasetInfo
from fedbn_flwr.data.samples import Examples, Samples
from fedbn_flwr.data.shapes import Shape
from fedbn_flwr.data.splits import Indices
from fedbn_flwr.data.validation import split_off
from fedbn_flwr.errors import ConfigError

__all__ = [
    "KINDS",
    "OwnData",
    "OwnRows",
    "decided_by_records",
    "is_own",
    "own_info",
    "own_rows",
    "own_sha256",
    "table_columns",
]

_READERS: dict[str, Callable[[OwnData], Found]] = {
    "folder": read_folder,
    "npz": read_arrays,
    "csv": read_table,
    "hf": read_hub,
}
_LARGEST = 224  # pixels; the height of larger images, unless image-size says more
_TEST_SEED = 0  # all runs and seeds have the same test examples


def own_info(request: OwnData) -> DatasetInfo:
    """Return the description of own data, after reading them (image files: their names and headers).

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    if twice := sorted({name for name in request.classes if request.classes.count(name) > 1}):
        raise ConfigError(f"class-names has {', '.join(twice)} twice.")
    return _info(request, _stamp(request)) if request.path else _elsewhere(request)


@functools.lru_cache(maxsize=8)
def _info(request: OwnData, stamp: tuple[int, ...]) -> DatasetInfo:
    found = _read(request, stamp)
    images = not isinstance(found.inputs, Tensor) or found.inputs.dtype == torch.uint8
    channels = (found.inputs.shape[1] if isinstance(found.inputs, Tensor) else 3) if images else 0
    mean, std = IMAGENET
    return DatasetInfo(
        request.name,
        found.num_classes,
        channels,
        min(found.size[0], _LARGEST) if images else 0,
        f"{len(found):,} examples of own data",
        "own data",
        functools.partial(_load, request, stamp),
        "",
        (mean if channels == 3 else (sum(mean) / 3,)) if images else (),
        (std if channels == 3 else (sum(std) / 3,)) if images else (),
        grouped=found.clients is not None,
        task=found.task,
        downloads=False,
        input_shape=() if images else tuple(found.inputs.shape[1:]) if isinstance(found.inputs, Tensor) else (),
        class_names=found.class_names,
        feature_names=found.feature_names,
        client_names=found.client_names,
        by_file=not isinstance(found.inputs, Tensor),
        notes=(*found.notes, *_note_of_positive(request, found)),
        warnings=(*found.warnings, *_warning_of_gaps(request, found)),
    )


def _warning_of_gaps(request: OwnData, found: Found) -> tuple[str, ...]:
    """Return the warning of numbers that are no class, of targets in memory."""
    if not isinstance(found.targets, Tensor) or found.task.name not in ("classification", "segmentation"):
        return ()
    classes = torch.unique(found.targets)
    classes = classes[classes != 255] if found.task.name == "segmentation" else classes
    return warning_of_gaps(request, len(classes), int(classes.max())) if len(classes) else ()


def _note_of_positive(request: OwnData, found: Found) -> tuple[str, ...]:
    """Return which of two named classes is the positive one, where the order of their names alone says so."""
    if found.task.name != "binary" or len(found.class_names) < 2 or request.class_names or request.positive_values:
        return ()
    zero, one = found.class_names
    return (f"positive (1) is {one!r}; class-names={one},{zero} makes it {zero!r}",)


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
    found = _read(request, _stamp(request))
    column, names = "row", list[int | str](range(len(found)))
    if not isinstance(found.inputs, Tensor):
        column, names = "file", [path.relative_to(request.path).as_posix() for path in found.inputs]
    elif request.kind == "csv" and Path(request.path).is_dir() and found.clients is not None:
        starts = np.unique(found.clients, return_index=True)[1]  # the tables follow one another, in any order
        names = [f"{found.client_names[c]}:{at - starts[c]}" for at, c in enumerate(found.clients)]
    return OwnRows(column, names, *_split(request, found), found.tests is not None)


def own_sha256(request: OwnData) -> str:
    """Return the SHA-256 of the examples in their order and of the division into training and test examples.

    The clients that the data name count, too. Image files count by their paths and sizes.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    return _sha256(request, _stamp(request))


@functools.lru_cache(maxsize=8)
def _sha256(request: OwnData, stamp: tuple[int, ...]) -> str:
    found, digest = _read(request, stamp), hashlib.sha256()
    for part in (found.inputs, found.targets):
        if isinstance(part, Tensor):
            digest.update(part.contiguous().numpy().tobytes())
        else:
            files = [f"{path.relative_to(request.path).as_posix()} {path.stat().st_size}" for path in part]
            digest.update("\n".join(files).encode())
    for rows in (*_split(request, found), *(() if found.clients is None else (found.clients,))):
        digest.update(rows.tobytes())
    digest.update("\n".join(found.client_names).encode())
    return digest.hexdigest()


def decided_by_records(request: OwnData, info: DatasetInfo) -> dict[str, str]:
    """Return what of a model's outputs and inputs the records decide, since the config does not state it.

    Args:
        request: what the config says of the data.
        info: their description.

    Returns:
        What the records decide, each with what the config must do.
    """
    if not request.path:
        return {}
    found, stated = dict[str, str](), dict[str, set[str]]()
    if info.task.by_pixel and not request.num_classes:
        found["the number of classes"] = "set num-classes"
    if info.task.name in ("classification", "binary") and not (request.class_names or request.positive_values):
        found["the names of the classes"] = "set class-names"
    for name, kinds in stated_features(request.feature_columns):
        stated[name] = {f"{name}={kind}" for kind in kinds} or {name}
    known = set[str]().union(*stated.values())
    columns = {name.partition("=")[0] for name in info.feature_names if "=" in name and name not in known}
    if columns:
        found[f"the features of {', '.join(sorted(columns))}"] = "state the categories in feature-columns, NAME:A|B"
    return found


@functools.lru_cache(maxsize=8)
def _read(request: OwnData, stamp: tuple[int, ...]) -> Found:
    del stamp  # only part of the cache key: a changed file is read again
    return _READERS[request.kind](request)


def _stamp(request: OwnData) -> tuple[int, ...]:
    """Return times and sizes of a file, or of a folder and what is in it, so that a process notices other data."""
    path = Path(request.path)
    try:
        inside = sorted(path.iterdir()) if path.is_dir() else []
        found = [path.stat(), *(one.stat() for one in inside)]
    except OSError:
        return ()
    return tuple(number for one in found for number in (one.st_mtime_ns, one.st_size))


@functools.lru_cache(maxsize=8)
def _elsewhere(request: OwnData) -> DatasetInfo:
    """Return the description of data that only the nodes have; the config must say what the model needs."""
    features = stated_features(request.feature_columns)
    wanted = {"csv": "feature-columns", "folder": "image-size", "npz": "image-size"}
    if request.kind not in wanted:
        raise ConfigError(f"dataset='{request.kind}:' needs a name, {request.kind}:NAME.")
    problems = []
    if not (features if request.kind == "csv" else request.image_size):
        problems.append(f"{wanted[request.kind]} is not set")
    if not request.task:
        problems.append("task is not set")
    task = chosen_task(request, "classification", (request.task,) if request.task else ("classification",))
    classes = request.num_classes or len(request.classes)
    if not classes and task.name not in ("binary", "regression"):
        problems.append("num-classes is not set")
    if problems:
        raise ConfigError(
            f"dataset={request.name!r} without a path: only the nodes have the data, so the config must say what the "
            f"model needs; {', '.join(problems)}."
        )
    width = sum(len(categories) or 1 for _, categories in features)
    mean, std = IMAGENET
    rows = request.kind == "csv"
    return DatasetInfo(
        request.name,
        1 if task.name == "binary" else classes or 1,
        0 if rows else 3,
        request.image_size,
        "own data of the nodes",
        "own data",
        _nothing,
        "its own data on each node, named by data-path in its node config",
        () if rows else mean,
        () if rows else std,
        grouped=False,
        task=task,
        downloads=False,
        input_shape=(width,) if rows else (),
        class_names=request.classes or (("negative", "positive") if request.positive_values else ()),
        feature_names=tuple(f"{name}={c}" if c else name for name, kinds in features for c in kinds or ("",)),
    )


def _nothing(folder: Path, shape: Shape) -> Loaded:
    raise ValueError("the data are on the nodes only")


def _load(request: OwnData, stamp: tuple[int, ...], folder: Path, shape: Shape) -> Loaded:
    """Return the training and the test examples: a reader of ``data.loading``."""
    del folder
    found = _read(request, stamp)
    parts = _split(request, found)
    numbers = [torch.from_numpy(part) for part in parts]
    groups = None if found.clients is None else torch.from_numpy(found.clients)
    units = None if found.units is None else torch.from_numpy(found.units)
    held: Sequence[Examples]
    if isinstance(found.inputs, Tensor):
        if not isinstance(found.targets, Tensor):
            raise TypeError("arrays have arrays of targets")
        held = [Samples(found.inputs[own], found.targets[own]) for own in numbers]
    else:
        order = np.concatenate(parts).tolist()
        masks = () if isinstance(found.targets, Tensor) else [found.targets[at] for at in order]
        labels = found.targets[order].tolist() if isinstance(found.targets, Tensor) else [0] * len(order)
        paths = [found.inputs[at] for at in order]
        held = hold(paths, labels, [len(part) for part in parts], shape, masks=masks, checked=True)
    both = [
        samples.regrouped(*(None if part is None else part[own] for part in (groups, units)))
        for samples, own in zip(held, numbers, strict=True)
    ]
    return Loaded(both[0], both[1], found.client_names)


def _split(request: OwnData, found: Found) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the training and of the test examples.

    Raises:
        ConfigError: the units of one patient are on both sides of the split that the data have.
    """
    everything = np.arange(len(found), dtype=np.int64)
    if found.tests is not None:
        if (
            found.units is not None
            and (both := np.intersect1d(found.units[found.tests], found.units[~found.tests])).size
        ):
            raise ConfigError(
                f"dataset={request.name!r}: {both.size} values of the group column are on both sides of the split "
                "that the data have. Correct the split, or leave split-column out: then a split by group is made."
            )
        return everything[~found.tests], everything[found.tests]
    by_class = isinstance(found.targets, Tensor) and found.targets.dtype == torch.int64
    cells = found.targets.numpy() if by_class and isinstance(found.targets, Tensor) else np.zeros(len(found), np.int64)
    if found.clients is not None:  # every client has its share of test examples
        cells = cells * len(found.client_names) + found.clients
    return split_off(everything, cells, request.test_share, _TEST_SEED, found.units)

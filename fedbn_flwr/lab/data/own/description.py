"""The description of own data, which the config gives where only the nodes have them."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.own.features import stated_features
from fedbn_flwr.lab.data.own.found import Targets
from fedbn_flwr.lab.data.own.reading import load, read, stamp_of
from fedbn_flwr.lab.data.own.request import OwnData, chosen_task, warning_of_gaps
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.registry import IMAGENET, DatasetInfo
from fedbn_flwr.lab.data.shapes import Shape, per_channel
from fedbn_flwr.training.tasks import Task

__all__ = ["decided_by_records", "own_info"]

_LARGEST = 224  # pixels; the height of larger images, unless image-size says more


def own_info(request: OwnData) -> DatasetInfo:
    """Return the description of own data, after reading them (image files: their names and headers).

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    if twice := sorted({name for name in request.classes if request.classes.count(name) > 1}):
        raise ConfigError(f"class-names has {', '.join(twice)} twice.")
    return _info(request, stamp_of(request)) if request.path else _info_of_nodes(request)


@functools.lru_cache(maxsize=8)
def _info(request: OwnData, stamp: tuple[int, ...]) -> DatasetInfo:
    found = read(request, stamp)
    inputs, targets = found.inputs, found.targets
    channels = inputs.channels
    mean, std = (per_channel(values, channels) for values in IMAGENET)
    return DatasetInfo(
        request.name,
        targets.num_classes,
        channels,
        min(inputs.size[0], _LARGEST) if channels else 0,
        f"{len(found):,} examples of own data",
        "own data",
        functools.partial(load, request, stamp),
        "",
        mean,
        std,
        grouped=found.clients is not None,
        task=targets.task,
        downloads=False,
        input_shape=() if channels else inputs.shape,
        class_names=targets.class_names,
        feature_names=inputs.feature_names,
        client_names=found.client_names,
        by_file=not isinstance(inputs.values, Tensor),
        notes=(*found.notes, *targets.notes, *inputs.notes, *_note_of_positive(request, targets)),
        warnings=(*inputs.warnings, *targets.warnings, *_warning_of_gaps(request, targets)),
    )


def _warning_of_gaps(request: OwnData, targets: Targets) -> tuple[str, ...]:
    """Return the warning of numbers that are no class, of targets in memory."""
    if not isinstance(targets.values, Tensor) or targets.task.name not in ("classification", "segmentation"):
        return ()
    classes = torch.unique(targets.values)
    classes = classes[classes != 255] if targets.task.name == "segmentation" else classes
    return warning_of_gaps(request, len(classes), int(classes.max())) if len(classes) else ()


def _note_of_positive(request: OwnData, targets: Targets) -> tuple[str, ...]:
    """Return which of two named classes is the positive one, where the order of their names alone says so."""
    if targets.task.name != "binary" or len(targets.class_names) < 2 or request.class_names or request.positive_values:
        return ()
    zero, one = targets.class_names
    return (f"positive (1) is {one!r}; class-names={one},{zero} makes it {zero!r}",)


@functools.lru_cache(maxsize=8)
def _info_of_nodes(request: OwnData) -> DatasetInfo:
    """Return the description of data that only the nodes have; the config must say what the model needs."""
    task = _checked_task(request)
    features = stated_features(request.feature_columns)
    rows = request.kind == "csv"
    mean, std = ((), ()) if rows else IMAGENET
    return DatasetInfo(
        request.name,
        1 if task.name == "binary" else request.num_classes or len(request.classes) or 1,
        0 if rows else 3,
        request.image_size,
        "own data of the nodes",
        "own data",
        _nothing,
        "its own data on each node, named by data-path in its node config",
        mean,
        std,
        grouped=False,
        task=task,
        downloads=False,
        input_shape=(sum(len(categories) or 1 for _, categories in features),) if rows else (),
        class_names=request.classes or (("negative", "positive") if request.positive_values else ()),
        feature_names=tuple(f"{name}={c}" if c else name for name, kinds in features for c in kinds or ("",)),
    )


def _checked_task(request: OwnData) -> Task:
    """Return the task, if the config says all that the model needs."""
    wanted = {"csv": "feature-columns", "folder": "image-size", "npz": "image-size"}
    if request.kind not in wanted:
        raise ConfigError(f"dataset='{request.kind}:' needs a name, {request.kind}:NAME.")
    problems = []
    if not (stated_features(request.feature_columns) if request.kind == "csv" else request.image_size):
        problems.append(f"{wanted[request.kind]} is not set")
    if not request.task:
        problems.append("task is not set")
    task = chosen_task(request, "classification", (request.task,) if request.task else ("classification",))
    if not (request.num_classes or request.classes or task.name in ("binary", "regression")):
        problems.append("num-classes is not set")
    if problems:
        raise ConfigError(
            f"dataset={request.name!r} without a path: only the nodes have the data, so the config must say what the "
            f"model needs; {', '.join(problems)}."
        )
    return task


def _nothing(folder: Path, shape: Shape) -> Loaded:
    raise ValueError("the data are on the nodes only")


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

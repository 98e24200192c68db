"""The description of own data, which the config gives where only the nodes have them."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data.names import as_list
from fedbn_flwr.lab.data.own.data_check import check_records
from fedbn_flwr.lab.data.own.features import stated_features
from fedbn_flwr.lab.data.own.function import function_info
from fedbn_flwr.lab.data.own.reading import load, read, stamp_of
from fedbn_flwr.lab.data.own.records import Targets
from fedbn_flwr.lab.data.own.request import FUNCTION, OwnData, chosen_task, warning_of_gaps
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
    if twice := sorted(name for name, count in Counter(request.classes).items() if count > 1):
        raise ConfigError(f"class-names has {', '.join(twice)} twice.")
    if not request.path:
        return _info_of_nodes(request)
    if request.kind == FUNCTION:
        return function_info(request)
    info, found = _info(request, stamp_of(request)), _check(request, stamp_of(request))
    if found and request.data_check == "refuse":
        raise DataError(f"dataset={request.name!r} (data-check=refuse):\n" + "\n".join(f"{line}." for line in found))
    return info


@functools.lru_cache(maxsize=8)
def _check(request: OwnData, stamp: tuple[int, ...]) -> tuple[str, ...]:
    return check_records(request, read(request, stamp))


@functools.lru_cache(maxsize=8)
def _info(request: OwnData, stamp: tuple[int, ...]) -> DatasetInfo:
    records = read(request, stamp)
    inputs, targets, channels = records.inputs, records.targets, records.inputs.channels
    mean, std = (per_channel(values, channels) for values in IMAGENET)
    return DatasetInfo(
        request.name,
        num_classes=targets.num_classes,
        channels=channels,
        size=min(inputs.size[0], _LARGEST) if channels else 0,
        summary=f"{len(records):,} examples of own data",
        source="own data",
        loader=functools.partial(load, request, stamp),
        files="",
        mean=mean,
        std=std,
        grouped=records.clients is not None,
        task=targets.task,
        downloads=False,
        input_shape=() if channels else inputs.shape,
        class_names=targets.class_names,
        feature_names=inputs.feature_names,
        client_names=records.client_names,
        notes=(*records.notes, *targets.notes, *inputs.notes, *_note_of_positive(request, targets)),
        warnings=(
            *inputs.warnings,
            *targets.warnings,
            *_warning_of_gaps(request, targets),
            *_check(request, stamp),
        ),
    )


def _warning_of_gaps(request: OwnData, targets: Targets) -> tuple[str, ...]:
    """Return the warning of numbers that are no class, of targets in memory."""
    if not isinstance(targets.values, Tensor) or targets.task.name != "classification":
        return ()
    classes = torch.unique(targets.values)
    return warning_of_gaps(request, len(classes), int(classes.max())) if len(classes) else ()


def _note_of_positive(request: OwnData, targets: Targets) -> tuple[str, ...]:
    """Return which of two named classes is the positive one, where the order of their names alone says so."""
    if targets.task.name != "binary" or len(targets.class_names) < 2 or request.class_names or request.positive_values:
        return ()
    zero, one = targets.class_names
    return (f"positive (1) is {one!r}; class-names={as_list([one, zero])} makes it {zero!r}",)


@functools.lru_cache(maxsize=8)
def _info_of_nodes(request: OwnData) -> DatasetInfo:
    """Return the description of data that only the nodes have; the config must say what the model needs."""
    task = _checked_task(request)
    features, of_rows = stated_features(request.feature_columns), request.kind == "csv"
    feature_names = list[str]()
    for name, categories in features:
        feature_names += [f"{name}={category}" for category in categories] or [name]
    mean, std = ((), ()) if of_rows else IMAGENET
    return DatasetInfo(
        request.name,
        num_classes=1 if task.name == "binary" else request.num_classes or len(request.classes) or 1,
        channels=0 if of_rows else 3,
        size=request.image_size,
        summary="own data of the nodes",
        source="own data",
        loader=_nothing,
        files="its own data on each node, named by data-path in its node config",
        mean=mean,
        std=std,
        task=task,
        downloads=False,
        input_shape=(len(feature_names),) if of_rows else (),
        class_names=request.classes or (("negative", "positive") if request.positive_values else ()),
        feature_names=tuple(feature_names),
    )


def _checked_task(request: OwnData) -> Task:
    """Return the task, if the config says all that the model needs."""
    if request.kind == "hf":
        raise ConfigError("dataset='hf:' needs a name, hf:NAME.")
    needed = {"feature-columns": bool(stated_features(request.feature_columns))}
    if request.kind != "csv":
        needed = {"image-size": request.image_size > 0}
    needed["task"] = bool(request.task)
    task = chosen_task(request, "classification", (request.task or "classification",))
    if task.name not in ("binary", "regression"):
        needed["num-classes"] = bool(request.num_classes or request.classes)
    if problems := [f"{key} is not set" for key, is_set in needed.items() if not is_set]:
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
    decided, known = dict[str, str](), set[str]()
    if info.task.by_pixel and not request.num_classes:
        decided["the number of classes"] = "set num-classes"
    if request.kind == FUNCTION:
        if info.task.name == "classification" and not (request.num_classes or request.class_names):
            decided["the number of classes"] = "set num-classes"
    elif info.task.name in ("classification", "binary") and not (request.class_names or request.positive_values):
        decided["the names of the classes"] = "set class-names"
    for name, categories in stated_features(request.feature_columns):
        known |= {f"{name}={category}" for category in categories} or {name}
    columns = {name.partition("=")[0] for name in info.feature_names if "=" in name and name not in known}
    if columns:
        decided[f"the features of {', '.join(sorted(columns))}"] = "state the categories in feature-columns, NAME:A|B"
    return decided

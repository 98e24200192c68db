"""Own data from an npz file with ``x``, ``y``, and maybe other arrays."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.forms.own_records import Records
from fedbn_flwr.lab.data.forms.request import (
    COMPLEX,
    OwnData,
    chosen_task,
    numbered,
    shown,
    tasks_of_classes,
)
from fedbn_flwr.lab.data.readers import READ_ERRORS
from fedbn_flwr.training.losses import IGNORED_PIXEL

logger = logging.getLogger("flwr")

_OF_EXAMPLES = ("client", "group", "split")
# for each allowed value of ``split``: whether it marks a test example
_SPLIT = {
    "train": False,
    "test": True,
    "0": False,
    "1": True,
    "False": False,
    "True": True,
}


def read_arrays(request: OwnData) -> Records:
    """Return the records of an npz file, from its arrays.

    ``x``: uint8 images (N, H, W) or (N, H, W, C) with 1 or 3 channels; or numbers:
    features (N, F), signals (N, C, L) of C channels and L steps, images (N, C, H, W).
    ``y``: classes 0 to K - 1 (N,), labels or targets (N, K), or classes of pixels (N,
    H, W). ``client`` and ``group``: whole numbers or text (N,); ``split``: "train" and
    "test", or 0 and 1. Other arrays are not used. With ``known_classes``, ``y`` may be
    absent.

    Raises:
        ConfigError: the targets do not fit the config.
        DataError: the file is not an npz file, or arrays are absent or do not fit; the
            message names the array.
    """
    arrays = _load(request)
    inputs = _inputs(request, arrays["x"])
    given: dict[str, Any] = {}
    if "client" in arrays:
        values = arrays["client"].tolist()
        given["clients"], given["client_names"] = numbered(values)
    if "group" in arrays:
        values = arrays["group"].tolist()
        given["units"], given["unit_names"] = numbered(values)
    if "split" in arrays:
        given["tests"] = _tests(request, arrays["split"])
    if "y" not in arrays:
        return Records.unlabelled(request, inputs, **given)
    found = _targets(request, arrays["y"], inputs)
    task = chosen_task(request, found.tasks)
    return Records(
        inputs=inputs,
        targets=torch.from_numpy(found.values),
        task=task,
        num_classes=task.outputs(found.count),
        **given,
    )


def _load(request: OwnData) -> dict[str, Any]:
    """Return the known arrays of the file, each with a row for each example."""
    path = request.existing()
    arrays = {}
    try:
        # Refuse pickles, because reading a pickle can run code from the file.
        with np.load(path, allow_pickle=False) as archive:
            names = archive.files
            for name in ("x", "y", *_OF_EXAMPLES):
                if name in names:
                    arrays[name] = archive[name]
    # For a file of a single array (.npy), ``with`` raises TypeError.
    except (TypeError, *READ_ERRORS) as error:
        raise request.problem(
            f"it cannot be read as an npz file of numbers and text: {error}. Save it"
            " with numpy.savez(path, x=inputs, y=targets)."
        ) from error
    others = [name for name in names if name not in arrays]
    if others:
        logger.warning(
            "%s: its arrays %s are ignored, since only x, y, %s are used",
            request.name,
            shown(others),
            ", ".join(_OF_EXAMPLES),
        )
    for name in ("x",) if request.known_classes else ("x", "y"):
        if name not in arrays:
            raise request.problem(f"no array {name}. It has {', '.join(names)}.")
    x = arrays["x"]
    for name, array in arrays.items():
        if array.ndim and not len(array):
            raise request.problem(
                f"{name} has shape {array.shape}, so it has no example. Give it at"
                " least one row."
            )
        if array.ndim == 0 or len(array) != len(x):
            raise request.problem(
                f"{name} has shape {array.shape}, but x has {x.shape}. Give each"
                " example one row."
            )
        if name in _OF_EXAMPLES and (array.ndim != 1 or array.dtype.kind not in "biuU"):
            raise request.problem(
                f"{name} is {array.dtype} of shape {array.shape}. Use whole numbers or"
                f" text of shape ({len(x)},)."
            )
    return arrays


def _inputs(request: OwnData, x: Any) -> Tensor:
    """Return uint8 images as (N, C, H, W) and other numbers as float32 (N, ...)."""
    # Arrays of bytes with three or four dimensions are images, with the channels in the
    # last axis.
    as_bytes = x.dtype == np.uint8
    if as_bytes and x.ndim == 3:
        x = x[..., None]
    channels_last = x.ndim == 4 and x.shape[3] in (1, 3)
    if as_bytes and channels_last:
        return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    if x.dtype.kind == "c":
        raise request.problem(f"x has complex numbers ({x.dtype}). {COMPLEX}")
    other_channels = as_bytes and x.ndim == 4
    if x.dtype.kind not in "biuf" or x.ndim < 2 or other_channels:
        raise request.problem(
            f"x is {x.dtype} of shape {x.shape}. Use uint8 images (N, H, W), (N, H, W,"
            " 1) or (N, H, W, 3), or numbers of another type: (N, F), (N, C, L) or (N, C,"
            " H, W)."
        )
    # Such a shape would be images with 8 or more channels that are 1 or 3 pixels wide.
    # More probably, the channels are in the wrong axis.
    if channels_last and min(x.shape[1:3]) >= 8:
        raise request.problem(
            f"x has shape {x.shape}, which looks like (N, H, W, C). Images of numbers"
            " are (N, C, H, W): save x.transpose(0, 3, 1, 2)."
        )
    # A number that is too large for float32 becomes infinite and is refused below.
    with np.errstate(over="ignore"):
        inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    bad = int((~inputs.isfinite()).sum())
    if bad:
        raise request.problem(
            f"{bad} numbers of x are NaN, infinite, or above 3e38. Replace them."
        )
    return inputs


@dataclass(frozen=True, eq=False)
class _Targets:
    """Targets of all examples, as ``y`` gives them.

    Attributes:
        values: the targets in the dtype of ``Samples``.
        tasks: the names of the tasks that fit them, the most probable first.
        count: number of classes, labels or target columns.
    """

    values: Any
    tasks: Sequence[str]
    count: int


def _targets(request: OwnData, y: Any, inputs: Tensor) -> _Targets:
    """Return the targets ``y``, as the config or else their form describes them."""
    if y.dtype.kind not in "biuf" or y.ndim > 3 or not np.isfinite(y).all():
        raise request.problem(
            f"y is {y.dtype} of shape {y.shape}. Use finite numbers (N,), (N, K) or (N,"
            " H, W)."
        )
    # Floats are targets of a regression, unless the config sets another task.
    if request.task:
        as_classes = request.task != "regression"
    else:
        as_classes = y.dtype.kind != "f"
    # In a table, the class of each example is a column of shape (N, 1).
    if as_classes and y.shape[1:] == (1,) and request.task != "multi-label":
        y = y[:, 0]
    if y.ndim == 3:
        return _of_pixels(request, y, inputs)
    if y.ndim == 2:
        return _several(request, y)
    if as_classes and (y == np.round(y)).all():
        return _classes(request, y.astype(np.int64))
    return _Targets(y.astype(np.float32), ("regression",), 1)


def _classes(request: OwnData, y: Any) -> _Targets:
    if request.task == "binary":
        count = 2
    else:
        count = request.num_classes or max(len(np.unique(y)), 2)
    # If nothing states that there are more classes, refuse data with class 0 only: this
    # is more often a wrongly filled column than a single class.
    stated = request.task or request.num_classes
    if y.min() < 0:
        raise request.problem(
            f"y has the class {y.min()} in {(y < 0).sum()} rows, but classes are 0 to"
            f" {count - 1}. Remove the rows without a class, or number all classes from"
            " 0 on."
        )
    if y.max() >= count or (not stated and not y.any()):
        wanted = max(y.max() + 1, 2)
        remedy = f"If other data have the absent classes, set num-classes={wanted}."
        if request.task == "binary":
            remedy = "task=binary has only these classes. Use task=classification."
        elif request.num_classes:
            remedy = f"num-classes={count} is too small. Set num-classes={wanted}."
        raise request.problem(
            f"y has classes {y.min()} to {y.max()} instead of 0 to {count - 1}."
            f" {remedy}"
        )
    return _Targets(y, tasks_of_classes(count), count)


def _several(request: OwnData, y: Any) -> _Targets:
    """Return the targets if each example has several labels or several numbers."""
    are_labels = bool(np.isin(y, (0, 1)).all())
    # One-hot classes look like several labels for each example, but the loss for labels
    # would train another model.
    if are_labels and not request.task and (y.sum(1) == 1).all():
        raise ConfigError(
            f"dataset={request.name!r}: y has a single 1 in each row. If each example"
            " has one class, save y.argmax(1). If an example may have several labels,"
            " set task=multi-label."
        )
    tasks = ("multi-label", "regression") if are_labels else ("regression",)
    return _Targets(y.astype(np.float32), tasks, y.shape[1])


def _of_pixels(request: OwnData, y: Any, inputs: Tensor) -> _Targets:
    """Return the targets of a segmentation: classes of pixels, 255 for ignored."""
    if inputs.dtype != torch.uint8 or inputs.shape[2:] != y.shape[1:]:
        raise request.problem(
            f"y has classes of pixels, {y.shape}, but x is not uint8 images of this"
            " height and width. Give both one height and width."
        )
    largest = int(y.max(where=y != IGNORED_PIXEL, initial=0))
    count = request.num_classes or largest + 1
    are_classes = y.dtype.kind in "iu" and y.min() >= 0 and largest < count
    # ``Samples`` keeps classes of pixels as bytes, so they must be at most 255.
    fit_into_bytes = largest <= IGNORED_PIXEL
    if not are_classes or count < 2 or not fit_into_bytes:
        raise request.problem(
            f"y is {y.dtype}, {y.min()} to {largest}. Use integers 0 to"
            f" {min(count, IGNORED_PIXEL) - 1} as classes of pixels. If there are other"
            " classes, set num-classes to the number of classes, 2 or more. 255 means"
            " an ignored pixel."
        )
    return _Targets(y.astype(np.uint8), ("segmentation",), count)


def _tests(request: OwnData, values: Any) -> Any:
    """Return whether each example is a test example, bool (N,)."""
    # An unknown value of ``split`` becomes None, so the array has the type object
    # instead of bool.
    tests = np.array([_SPLIT.get(str(value)) for value in values.tolist()])
    if tests.dtype != bool or tests.all() or not tests.any():
        raise request.problem(
            f"split has {', '.join(map(str, np.unique(values)[:8]))}. Use both train"
            " and test (or 0 and 1)."
        )
    return tests

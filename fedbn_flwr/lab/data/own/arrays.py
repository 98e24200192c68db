"""npz files with the arrays ``x`` and ``y`` and, where there are any, ``client``,
``group`` and ``split``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.own.records import Records
from fedbn_flwr.lab.data.own.request import OwnData, chosen_task, numbered
from fedbn_flwr.lab.data.readers import READ_ERRORS
from fedbn_flwr.training.losses import IGNORED_PIXEL
from fedbn_flwr.training.tasks import Task

__all__ = ["read_arrays"]

_OF_EXAMPLES = ("client", "group", "split")
_SPLIT = {
    "train": False,
    "test": True,
    "0": False,
    "1": True,
    "False": False,
    "True": True,
}


def read_arrays(request: OwnData) -> Records:
    """Return the arrays of an npz file.

    ``x``: uint8 images (N, H, W) or (N, H, W, C) with 1 or 3 channels; or numbers:
    features (N, F), signals (N, C, L) of C channels and L steps, images (N, C, H, W).
    ``y``: classes 0 to K - 1 (N,), labels or targets (N, K), or classes of pixels (N,
    H, W). ``client`` and ``group``: whole numbers or text (N,); ``split``: "train" and
    "test", or 0 and
    1. Other arrays are not used.

    Raises:
        ConfigError: the targets do not fit the config.
        DataError: the file is no npz file, arrays are absent, or do not fit; the
            message names the array.
    """
    arrays = _load(request)
    inputs = _inputs(request, arrays["x"])
    targets, task, num_classes = _targets(request, arrays["y"], inputs)
    clients, client_names = (
        numbered(arrays["client"].tolist()) if "client" in arrays else (None, ())
    )
    units, unit_names = (
        numbered(arrays["group"].tolist()) if "group" in arrays else (None, ())
    )
    return Records(
        inputs=inputs,
        targets=targets,
        task=task,
        num_classes=num_classes,
        size=tuple(inputs.shape[2:]) if inputs.dtype == torch.uint8 else (),
        clients=clients,
        client_names=client_names,
        units=units,
        unit_names=unit_names,
        tests=_tests(request, arrays["split"]) if "split" in arrays else None,
    )


def _load(request: OwnData) -> dict[str, Any]:
    """Return the known arrays of the file, each with a value, or several, for each
    example of ``x``.
    """
    path = request.existing()
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = archive.files
            arrays = {
                name: archive[name]
                for name in ("x", "y", *_OF_EXAMPLES)
                if name in names
            }
    except (TypeError, *READ_ERRORS) as error:  # TypeError: a single array
        raise request.problem(
            f"it cannot be read as an npz file of numbers and text: {error}. Save it"
            " with numpy.savez(path, x=inputs, y=targets)."
        ) from error
    for name in ("x", "y"):
        if name not in arrays:
            raise request.problem(f"no array {name}; it has {', '.join(names)}.")
    x = arrays["x"]
    for name, array in arrays.items():
        if array.ndim == 0 or not len(array) or len(array) != len(x):
            raise request.problem(
                f"{name} has shape {array.shape}, x has {x.shape}; one row for each"
                " example needed."
            )
        if name in _OF_EXAMPLES and (array.ndim != 1 or array.dtype.kind not in "biuU"):
            raise request.problem(
                f"{name} is {array.dtype} of shape {array.shape}; whole numbers or text"
                f" ({len(x)},) needed."
            )
    return arrays


def _inputs(request: OwnData, x: Any) -> Tensor:
    """Return uint8 images as (N, C, H, W) and other numbers as float32 (N, ...)."""
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[..., None]
    channels_last = x.ndim == 4 and x.shape[3] in (1, 3)
    if x.dtype == np.uint8 and channels_last:
        return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    if (
        x.dtype.kind not in "biuf"
        or x.ndim < 2
        or (x.dtype == np.uint8 and x.ndim == 4)
    ):
        raise request.problem(
            f"x is {x.dtype} of shape {x.shape}; needed are uint8 images (N, H, W), (N,"
            " H, W, 1) or (N, H, W, 3), or numbers (N, F), (N, C, L) or (N, C, H, W)."
        )
    if channels_last and min(x.shape[1:3]) >= 8:
        raise request.problem(
            f"x has shape {x.shape}, which looks like (N, H, W, C). Images of numbers"
            " are (N, C, H, W): save x.transpose(0, 3, 1, 2)."
        )
    with np.errstate(over="ignore"):
        inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if bad := int((~inputs.isfinite()).sum()):
        raise request.problem(
            f"{bad} numbers of x are NaN or infinite, or above 3e38. Fill them in."
        )
    return inputs


def _targets(request: OwnData, y: Any, inputs: Tensor) -> tuple[Tensor, Task, int]:
    """Return the targets, their task, and the number of the model's outputs."""
    if y.dtype.kind not in "biuf" or y.ndim > 3 or not np.isfinite(y).all():
        raise request.problem(
            f"y is {y.dtype} of shape {y.shape}; finite numbers (N,), (N, K) or (N, H,"
            " W) needed."
        )
    if y.ndim == 3:
        return _of_pixels(request, y, inputs)
    if y.ndim == 2:
        return _several(request, y)
    # Floats are targets of a regression, unless the config says that they are classes.
    as_classes = request.task != "regression" if request.task else y.dtype.kind != "f"
    if as_classes and (y == np.round(y)).all():
        return _classes(request, y.astype(np.int64))
    task = chosen_task(request, "regression", ("regression",))
    return torch.from_numpy(y.astype(np.float32)), task, 1


def _classes(request: OwnData, y: Any) -> tuple[Tensor, Task, int]:
    count = (
        2
        if request.task == "binary"
        else request.num_classes or max(len(np.unique(y)), 2)
    )
    if (
        y.min() < 0
        or y.max() >= count
        or (not request.task and not request.num_classes and not y.any())
    ):
        raise request.problem(
            f"y has classes {y.min()} to {y.max()}; 0 to {count - 1} needed. If other"
            f" data have the absent ones, set num-classes={max(y.max() + 1, 2)}."
        )
    task = chosen_task(
        request,
        "classification",
        ("classification", "binary") if count == 2 else ("classification",),
    )
    return torch.from_numpy(y), task, 1 if task.name == "binary" else count


def _several(request: OwnData, y: Any) -> tuple[Tensor, Task, int]:
    """Return labels or numbers, several for each example."""
    are_labels = bool(np.isin(y, (0, 1)).all())
    if are_labels and not request.task and (y.sum(1) == 1).all():
        raise ConfigError(
            f"dataset={request.name!r}: y has a single 1 in each row. If each example"
            " is of one class, save y.argmax(1); if several labels could be true, set"
            " task=multi-label."
        )
    allowed = ("multi-label", "regression") if are_labels else ("regression",)
    return (
        torch.from_numpy(y.astype(np.float32)),
        chosen_task(request, allowed[0], allowed),
        y.shape[1],
    )


def _of_pixels(request: OwnData, y: Any, inputs: Tensor) -> tuple[Tensor, Task, int]:
    """Return the class of each pixel, and 255 for pixels that are ignored."""
    if inputs.dtype != torch.uint8 or inputs.shape[2:] != y.shape[1:]:
        raise request.problem(
            f"y has classes of pixels, {y.shape}; x must be uint8 images of this height"
            " and width."
        )
    largest = int(y.max(where=y != IGNORED_PIXEL, initial=0))
    count = request.num_classes or largest + 1
    if (
        y.dtype.kind not in "iu"
        or y.min() < 0
        or largest >= count
        or count < 2
        or largest > IGNORED_PIXEL
    ):
        raise request.problem(
            f"y is {y.dtype}, {y.min()} to {largest}; classes of pixels 0, 1, ... (with"
            f" num-classes={count}) needed, as 255 is for pixels that do not count."
        )
    return (
        torch.from_numpy(y.astype(np.uint8)),
        chosen_task(request, "segmentation", ("segmentation",)),
        count,
    )


def _tests(request: OwnData, values: Any) -> Any:
    """Return which examples are test examples, bool (N,)."""
    tests = np.array([_SPLIT.get(str(value)) for value in values.tolist()])
    if tests.dtype != bool or tests.all() or not tests.any():
        raise request.problem(
            f"split has {', '.join(map(str, np.unique(values)[:8]))}; train and test (0"
            " and 1) needed."
        )
    return tests

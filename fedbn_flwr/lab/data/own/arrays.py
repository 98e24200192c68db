"""npz files with the arrays ``x`` and ``y`` and, where there are any, ``client``, ``group`` and ``split``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.own.records import Records
from fedbn_flwr.lab.data.own.request import OwnData, chosen_task, numbered, shown
from fedbn_flwr.lab.data.readers import READ_ERRORS
from fedbn_flwr.training.losses import IGNORED_PIXEL
from fedbn_flwr.training.tasks import Task

__all__ = ["read_arrays"]

_KNOWN = ("x", "y", "client", "group", "split")
_OF_EXAMPLES = ("client", "group", "split")
_SAVED = "numpy.savez(path, x=inputs, y=targets)"


def read_arrays(request: OwnData) -> Records:
    """Return the arrays of an npz file.

    ``x``: uint8 images (N, H, W) or (N, H, W, C) with 1 or 3 channels; or numbers: features (N, F), signals (N, C, L)
    of C channels and L steps, images (N, C, H, W). ``y``: classes 0 to K - 1 (N,), labels or targets (N, K), or classes
    of pixels (N, H, W). ``client`` and ``group``: numbers or text (N,); ``split``: "train" and "test", or 0 and 1.

    Raises:
        ConfigError: the targets do not fit the config.
        DataError: the file is no npz file, arrays are absent, or do not fit; the message names the array.
    """
    arrays, others = _load(request)
    _check_lengths(request, arrays)
    inputs = _inputs(request, arrays["x"])
    targets, task, num_classes = _targets(request, arrays["y"], inputs)
    clients, client_names = numbered(arrays["client"].tolist()) if "client" in arrays else (None, ())
    units, unit_names = numbered(arrays["group"].tolist()) if "group" in arrays else (None, ())
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
        notes=tuple(f"array {name!r} is not used" for name in others),
    )


def _load(request: OwnData) -> tuple[dict[str, Any], list[str]]:
    """Return the arrays of the file that are known, ``x`` and ``y`` among them, and the names of the others."""
    path = request.existing()
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("one array")
        with archive:
            arrays = {name: archive[name] for name in archive.files if name in _KNOWN}
            names = list(archive.files)
    except ValueError as error:  # NumPy's text is about pickles, which are never read
        raise request.problem(
            f"it cannot be read as an npz file: it is none, or it holds Python objects. Save arrays of numbers or text "
            f"with {_SAVED}."
        ) from error
    except READ_ERRORS as error:
        raise request.problem(f"it cannot be read as an npz file: {error}") from error
    if absent := [name for name in ("x", "y") if name not in arrays]:
        raise request.problem(f"no array {' and '.join(absent)}; it has {shown(names)}. Save it with {_SAVED}.")
    return arrays, [name for name in names if name not in _KNOWN]


def _check_lengths(request: OwnData, arrays: Mapping[str, Any]) -> None:
    """Raise DataError unless each array has a value, or several, for each example of ``x``."""
    count = len(np.atleast_1d(arrays["x"]))
    if arrays["x"].ndim == 0 or not count:
        raise request.problem(f"x has shape {arrays['x'].shape}; one row for each example needed.")
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != count:
            raise request.problem(f"{name} has shape {array.shape}, x has {count} examples.")
        if name not in _OF_EXAMPLES:
            continue
        has_nan = array.dtype.kind == "f" and np.isnan(array).any()
        if array.dtype.kind not in "biufU" or array.ndim != 1 or has_nan:
            raise request.problem(
                f"{name} is {array.dtype} of shape {array.shape}; numbers or text ({count},) without NaN needed."
            )


def _inputs(request: OwnData, x: Any) -> Tensor:
    """Return uint8 images as (N, C, H, W) and other numbers as float32 (N, ...)."""
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        images = torch.from_numpy(np.ascontiguousarray(x if x.ndim == 4 else x[..., None]))
        if images.shape[3] not in (1, 3):
            raise request.problem(f"x is uint8 of shape {x.shape}; images are (N, H, W), (N, H, W, 1) or (N, H, W, 3).")
        return images.permute(0, 3, 1, 2).contiguous()
    if x.ndim == 4 and x.shape[3] in (1, 3, 4) and min(x.shape[1:3]) >= 8:
        raise request.problem(
            f"x is {x.dtype} of shape {x.shape}, which looks like (N, H, W, C). Images of numbers are (N, C, H, W): "
            "save x.transpose(0, 3, 1, 2)."
        )
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise request.problem(
            f"x is {x.dtype} of shape {x.shape}; needed are uint8 images (N, H, W[, C]) or numbers (N, F), (N, C, L) "
            "or (N, C, H, W)."
        )
    with np.errstate(over="ignore"):
        inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if bad := int((~inputs.isfinite()).sum()):
        raise request.problem(f"{bad} numbers of x are NaN or infinite, or above 3e38. Fill them in.")
    return inputs


def _targets(request: OwnData, y: Any, inputs: Tensor) -> tuple[Tensor, Task, int]:
    """Return the targets, their task, and the number of the model's outputs."""
    if y.dtype.kind not in "biuf":
        raise request.problem(f"y is {y.dtype}; numbers needed, classes as 0 to K - 1.")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise request.problem(f"{int((~np.isfinite(y)).sum())} values of y are NaN or infinite.")
    if y.ndim == 3:
        return _of_pixels(request, y, inputs)
    if y.ndim == 2:
        return _several(request, y)
    if y.ndim != 1:
        raise request.problem(f"y has shape {y.shape}; (N,), (N, K) or (N, H, W) needed.")
    whole = bool((y == np.round(y)).all())
    as_classes = request.task not in ("", "regression") or (request.task == "" and y.dtype.kind != "f")
    if whole and as_classes:
        return _classes(request, y.astype(np.int64))
    task = chosen_task(request, "regression", ("regression",))
    return torch.from_numpy(y.astype(np.float32)), task, 1


def _classes(request: OwnData, y: Any) -> tuple[Tensor, Task, int]:
    stated = 2 if request.task == "binary" else request.num_classes
    different, largest = len(np.unique(y)), int(y.max())
    if y.min() < 0 or (stated and largest >= stated):
        raise request.problem(f"y has classes {y.min()} to {largest}; 0 to {(stated or different) - 1} needed.")
    if not stated and (different != largest + 1 or different < 2):
        raise request.problem(
            f"y has {different} different classes, and the largest is {largest}: number them 0 to {different - 1}, or "
            f"set num-classes={max(largest + 1, 2)} if other data have the absent ones."
        )
    count = stated or different
    task = chosen_task(request, "classification", ("classification", "binary") if count == 2 else ("classification",))
    return torch.from_numpy(y), task, 1 if task.name == "binary" else count


def _several(request: OwnData, y: Any) -> tuple[Tensor, Task, int]:
    """Return labels or numbers, several for each example."""
    are_labels = bool(np.isin(y, (0, 1)).all())
    if are_labels and not request.task and (y.sum(1) == 1).all():
        raise ConfigError(
            f"dataset={request.name!r}: y has a single 1 in each row. If each example is of one class, save "
            "y.argmax(1); if several labels could be true, set task=multi-label."
        )
    allowed = ("multi-label", "regression") if are_labels else ("regression",)
    return torch.from_numpy(y.astype(np.float32)), chosen_task(request, allowed[0], allowed), y.shape[1]


def _of_pixels(request: OwnData, y: Any, inputs: Tensor) -> tuple[Tensor, Task, int]:
    """Return the class of each pixel, and 255 for pixels that are ignored."""
    if inputs.dtype != torch.uint8 or tuple(inputs.shape[2:]) != y.shape[1:]:
        raise request.problem(
            f"y has shape {y.shape}, the classes of pixels, and x {tuple(inputs.shape)}; uint8 images of the same "
            "height and width needed."
        )
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() > IGNORED_PIXEL:
        raise request.problem(f"y is {y.dtype}, {y.min()} to {y.max()}; classes 0 to 254 needed, 255 = ignored.")
    known = y[y != IGNORED_PIXEL]
    largest = int(known.max()) if known.size else 0
    if request.num_classes and largest >= request.num_classes:
        raise request.problem(f"y has class {largest}, and num-classes={request.num_classes}.")
    if not request.num_classes and not largest:
        raise request.problem("y has one class only, 0, as 255 is for pixels that do not count. Save classes as 0, 1.")
    task = chosen_task(request, "segmentation", ("segmentation",))
    return torch.from_numpy(y.astype(np.uint8)), task, request.num_classes or largest + 1


def _tests(request: OwnData, values: Any) -> Any:
    """Return which examples are test examples, bool (N,)."""
    known = {"train": False, "test": True, "0": False, "1": True, "False": False, "True": True}
    text = [str(value) for value in values.tolist()]
    if unknown := sorted({value for value in text if value not in known}):
        raise request.problem(f"split has {shown(unknown)}; train and test (0 and 1) needed.")
    tests = np.array([known[value] for value in text])
    if tests.all() or not tests.any():
        raise request.problem(f"by split all examples are {'test' if tests.all() else 'training'} examples.")
    return tests

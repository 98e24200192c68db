"""npz files with the arrays ``x`` and ``y`` and, where there are any, ``client``, ``group`` and ``split``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.names import one_form
from fedbn_flwr.lab.data.own.features import note_of_filled, problem_of_numbers
from fedbn_flwr.lab.data.own.masks import PixelValues, pixel_targets
from fedbn_flwr.lab.data.own.records import Inputs, Records, Targets
from fedbn_flwr.lab.data.own.request import OwnData, numbered, shown
from fedbn_flwr.lab.data.own.targets import read_targets
from fedbn_flwr.lab.data.readers import READ_ERRORS

__all__ = ["as_inputs", "as_tests", "read_arrays"]

_KNOWN = ("x", "y", "client", "group", "split")


def read_arrays(request: OwnData) -> Records:
    """Return the arrays of an npz file.

    ``x``: uint8 images (N, H, W) or (N, H, W, C) with 1 or 3 channels; or numbers: features (N, F), signals (N, C, L)
    of C channels and L steps, images (N, C, H, W). ``y``: classes (N,), labels or targets (N, K), or classes of pixels
    (N, H, W).
    ``client`` and ``group``: numbers or text (N,); ``split``: "train" and "test", or 0 and 1.

    Raises:
        DataError: the file is no npz file, arrays are absent, or do not fit; the message names the array.
    """
    arrays, others = _load(request)
    _check_lengths(request, arrays)
    inputs = as_inputs(request, arrays["x"], "x")
    if arrays["x"].ndim == 2:
        _check_features(request, arrays["x"])
    y = arrays["y"]
    targets = _pixels(request, inputs, y) if y.ndim == 3 else read_targets(request, y, "y")
    clients, client_names = numbered(arrays["client"].tolist()) if "client" in arrays else (None, ())
    units, unit_names = numbered(arrays["group"].tolist()) if "group" in arrays else (None, ())
    return Records(
        inputs=inputs,
        targets=targets,
        clients=clients,
        client_names=client_names,
        units=units,
        unit_names=unit_names,
        tests=as_tests(request, arrays["split"], "split") if "split" in arrays else None,
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
            arrays = {name: _stripped(archive[name]) for name in archive.files if name in _KNOWN}
            names = list(archive.files)
    except ValueError as error:  # NumPy's text is about pickles, which are never read
        raise DataError(
            f"dataset={request.name!r} cannot be read as an npz file: it is none, or it holds Python objects. Save "
            "arrays of numbers or text with numpy.savez(path, x=inputs, y=targets)."
        ) from error
    except READ_ERRORS as error:
        raise DataError(f"dataset={request.name!r} cannot be read as an npz file: {error}") from error
    if absent := [name for name in ("x", "y") if name not in arrays]:
        raise DataError(
            f"dataset={request.name!r} lacks the array {' and '.join(absent)}; it has {shown(names)}. Save it with "
            "numpy.savez(path, x=inputs, y=targets)."
        )
    return arrays, [name for name in names if name not in _KNOWN]


def _check_lengths(request: OwnData, arrays: Mapping[str, Any]) -> None:
    """Raise DataError unless each array has a value, or several, for each example of ``x``."""
    count = len(np.atleast_1d(arrays["x"]))
    if arrays["x"].ndim == 0 or not count:
        raise request.problem(f"x has shape {arrays['x'].shape}; one row for each example needed.")
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != count:
            raise request.problem(f"{name} has shape {array.shape}, x has {count} examples.")
        if name != "x" and array.dtype.kind not in "biufU":
            raise request.problem(f"{name} is {array.dtype}; numbers or text needed.")
        has_nan = array.dtype.kind == "f" and np.isnan(array).any()
        if name in ("client", "group", "split") and (array.ndim != 1 or has_nan):
            raise request.problem(f"{name} has shape {array.shape}; ({count},) without NaN needed.")


def _stripped(array: Any) -> Any:
    """Return text without spaces around it and in one form, bytes as text, other arrays as they are."""
    text = np.char.decode(array, "utf-8", "replace") if array.dtype.kind == "S" else array
    if text.dtype.kind != "U":
        return text
    return np.array([one_form(value) for value in text.ravel().tolist()], dtype=str).reshape(text.shape)


def _check_features(request: OwnData, x: Any) -> None:
    """Raise DataError if float32 does not tell the values of a column (N, F) apart."""
    problems = [problem_of_numbers(f"column {at} of x", values) for at, values in enumerate(x.T)]
    if any(problems):
        raise DataError(f"dataset={request.name!r}:\n" + "\n".join(filter(None, problems)))


def as_inputs(request: OwnData, x: Any, what: str) -> Inputs:
    """Return uint8 images as (N, C, H, W) and other numbers as float32 (N, ...).

    Raises:
        DataError: the array has no such shape, or holds no numbers, or infinite ones.
    """
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        images = torch.from_numpy(np.ascontiguousarray(x if x.ndim == 4 else x[..., None]))
        if images.shape[3] not in (1, 3):
            raise request.problem(
                f"{what} is uint8 of shape {x.shape}; images are (N, H, W), (N, H, W, 1) or (N, H, W, 3)."
            )
        return Inputs(images.permute(0, 3, 1, 2).contiguous(), size=tuple(images.shape[1:3]))
    if _looks_like_channels_last(x):
        raise request.problem(
            f"{what} is {x.dtype} of shape {x.shape}, which looks like (N, H, W, C). Images "
            f"of numbers are (N, C, H, W): save {what}.transpose(0, 3, 1, 2)."
        )
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise request.problem(
            f"{what} is {x.dtype} of shape {x.shape}; needed are uint8 images (N, H, W[, C]) "
            "or numbers (N, F), (N, C, L) or (N, C, H, W)."
        )
    with np.errstate(over="ignore"):
        inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if infinite := int(inputs.isinf().sum()):
        raise request.problem(f"{infinite} numbers of {what} are infinite, or above 3e38.")
    if request.missing == "refuse" and (missing := int(inputs.isnan().sum())):
        raise request.problem(
            f"{missing} numbers of {what} are missing (NaN). Use missing=mean for the mean of the training examples."
        )
    return Inputs(inputs, notes=note_of_filled(inputs), warnings=_warning_of_square(what, x))


def _warning_of_square(what: str, x: Any) -> tuple[str, ...]:
    """Return the warning of signals that look like grey images."""
    if x.ndim != 3 or x.shape[1] != x.shape[2] or x.shape[1] == 1:
        return ()
    channels, steps = x.shape[1:]
    return (
        f"{what} is {x.dtype} of shape {x.shape}: signals of {channels} channels and {steps} steps. If these are grey "
        f"images, add the axis of the channel: save {what}[:, None], of shape {(len(x), 1, channels, steps)}",
    )


def _looks_like_channels_last(x: Any) -> bool:
    if x.ndim != 4 or min(x.shape[1:3]) < 8:
        return False
    return x.shape[3] in (3, 4) or (x.shape[3] == 1 and x.shape[1] == x.shape[2])


def as_tests(request: OwnData, values: Any, what: str) -> Any:
    """Return which examples are test examples, bool (N,).

    Raises:
        DataError: a value is neither "train" nor "test" (0 nor 1), or one part is empty.
    """
    known = {"train": False, "test": True, "0": False, "1": True, "false": False, "true": True}
    text = [str(value).strip().lower().removesuffix(".0") for value in np.asarray(values).tolist()]
    if unknown := sorted({value for value in text if value not in known}):
        raise request.problem(f"{what} has {shown(unknown)}; train and test (0 and 1) needed.")
    tests = np.array([known[value] for value in text])
    if tests.all() or not tests.any():
        raise request.problem(f"by {what} all examples are {'test' if tests.all() else 'training'} examples.")
    return tests


def _pixels(request: OwnData, inputs: Inputs, y: Any) -> Targets:
    if inputs.size != y.shape[1:]:
        raise request.problem(
            f"y has shape {y.shape}, the classes of pixels, and x {(len(y), *inputs.shape)}; "
            "uint8 images of the same height and width needed."
        )
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() > 255:
        raise request.problem(f"y is {y.dtype}, {y.min()} to {y.max()}; classes 0 to 254 needed, 255 = ignored.")
    masks, values = y.astype(np.uint8), PixelValues()
    for mask in masks:
        values.add(mask)
    return pixel_targets(request, torch.from_numpy(masks), values)

"""Targets of own data, from the values of a column or array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data.own.found import Targets
from fedbn_flwr.lab.data.own.request import OwnData, chosen_task, listed, numbered_classes, oddly_written, shown

__all__ = ["read_targets"]

_MOST_CLASSES = 1000
_FEW = 20  # values that may be classes


def read_targets(
    request: OwnData, values: Any, what: str, row: Callable[[int], str] = "row {}".format, names: Sequence[str] = ()
) -> Targets:
    """Return the targets, and what follows from them.

    Args:
        request: the task and the positive values.
        values: an array (N,) or (N, K), numbers or text.
        what: the column or array, for messages.
        row: returns where the example of a number is, for messages.
        names: the classes in order, if the values are text and the config does not name them.

    Raises:
        ConfigError: the values are not for the task, or there are no positive ones.
        DataError: values are missing, or are no classes.
    """
    values = np.asarray(values)
    _refuse_missing(request, values, what, row)
    if values.ndim == 2 and values.shape[1] == 1 and request.task != "multi-label":
        values = values[:, 0]
    if request.positive_values:
        return _binary(request, values, what)
    if values.ndim == 2:
        return _several(request, values, what, row)
    if values.ndim != 1:
        raise DataError(f"dataset={request.name!r}: {what} have shape {values.shape}; (N,) or (N, K) needed.")
    text = values.dtype.kind not in "biuf"
    if request.task == "regression" and not text:
        return _numbers(request, values)
    if text or values.dtype.kind in "biu" or _are_labels(request, values, what):
        return _classes(request, values, what, text, names)
    return _numbers(request, values)


def _refuse_missing(request: OwnData, values: Any, what: str, row: Callable[[int], str]) -> None:
    missing = _missing(values)
    if missing.any():
        first = int(np.flatnonzero(missing.reshape(len(values), -1).any(1))[0])
        raise DataError(
            f"dataset={request.name!r}: {int(missing.sum())} of the {len(values)} values of {what} are missing or "
            f"infinite (the first in {row(first)}, counted from 0). Leave these examples out, or fill them in."
        )


def _are_labels(request: OwnData, values: Any, what: str) -> bool:
    """Return whether numbers with a decimal point are classes: whole ones are if the config asks for classes.

    Without a task in the config 0 and 1 are classes, and fractions are not.

    Raises:
        ConfigError: the config must say it, or its task does not fit.
    """
    whole = bool(np.all(np.mod(values, 1) == 0))
    asked = bool(request.task) or request.num_classes > 0
    if whole and (asked or bool(np.isin(values, (0, 1)).all())):
        return True
    if request.task:
        raise ConfigError(
            f"task={request.task} does not fit {what} of dataset={request.name!r}: numbers with fractions "
            f"({shown([str(v) for v in values[:3]])}) are for task=regression."
        )
    if whole and len(np.unique(values)) <= _FEW:
        raise ConfigError(
            f"dataset={request.name!r}: {what} are whole numbers with a decimal point "
            f"({shown([str(v) for v in np.unique(values)])}): set task=classification if they are classes, "
            "task=regression if not."
        )
    return False


def _classes(request: OwnData, values: Any, what: str, text: bool, known: Sequence[str]) -> Targets:
    counts = len(np.unique(values))
    if text and (odd := oddly_written(values.tolist())) and not (request.classes or known):
        raise DataError(f"dataset={request.name!r}: {what} are {odd}, or state them as class-names.")
    if counts > _MOST_CLASSES and counts > len(values) // 2:
        raise DataError(
            f"dataset={request.name!r}: {what} have {counts} different values in {len(values)} examples, which are no "
            "classes. Use another label-column, or task=regression for numbers."
        )
    names: tuple[str, ...] = ()
    most = request.num_classes or (2 if request.task == "binary" else _MOST_CLASSES)
    # Numbers from 0 are the classes; others, 1 and 2 say, are numbered in their order.
    if not request.classes and not text and values.min() == 0 and values.max() < most:
        labels = values.astype(np.int64)  # the numbers of the classes
        found = int(labels.max()) + 1
    else:
        labels, names = numbered_classes(request, [v if text else int(v) for v in values.tolist()], what, known)
        found = len(names)
    task = chosen_task(request, "classification", ("classification", *(("binary",) if found <= 2 else ())))
    if request.num_classes and request.num_classes < found:
        raise ConfigError(
            f"num-classes={request.num_classes} is fewer than the {found} classes in {what} of dataset="
            f"{request.name!r}."
        )
    if task.name != "binary" and max(found, request.num_classes) < 2:
        raise DataError(
            f"dataset={request.name!r}: {what} have one class only ({shown([str(v) for v in values[:1]])})."
        )
    outputs = 1 if task.name == "binary" else max(found, request.num_classes)
    return Targets(torch.from_numpy(labels), task, outputs, names)


def _several(request: OwnData, values: Any, what: str, row: Callable[[int], str]) -> Targets:
    if values.dtype.kind not in "biuf":
        raise DataError(f"dataset={request.name!r}: {what} hold text; several targets must be numbers.")
    labels = bool(np.isin(values, (0, 1)).all())
    one_hot = labels and bool((values.sum(1) == 1).all())
    if one_hot and not request.task:
        raise ConfigError(
            f"dataset={request.name!r}: {what} have a single 1 in each row: set task=classification if each example "
            "is of one class, task=multi-label if several labels could be true."
        )
    if request.task == "classification" and labels and not one_hot:
        first = int(np.flatnonzero(values.sum(1) != 1)[0])
        raise ConfigError(
            f"task=classification does not fit {what} of dataset={request.name!r}: {row(first)} has "
            f"{int(values[first].sum())} labels. Several labels are for task=multi-label."
        )
    if one_hot and request.task == "classification":
        return _of_columns(request, values, what)
    task = chosen_task(
        request, "multi-label" if labels else "regression", (*(("multi-label",) if labels else ()), "regression")
    )
    return Targets(torch.from_numpy(values.astype(np.float32)), task, values.shape[1])


def _of_columns(request: OwnData, values: Any, what: str) -> Targets:
    """Return classes from one-hot rows: a class for each column."""
    columns = values.shape[1]
    if request.classes and len(request.classes) != columns:
        raise ConfigError(f"class-names has {len(request.classes)} names; {what} have {columns} columns.")
    if request.num_classes and request.num_classes < columns:
        raise ConfigError(f"num-classes={request.num_classes} is fewer than the {columns} columns of {what}.")
    task = chosen_task(request, "classification", ("classification",))
    return Targets(torch.from_numpy(values.argmax(1)), task, max(columns, request.num_classes), request.classes)


def _numbers(request: OwnData, values: Any) -> Targets:
    task = chosen_task(request, "regression", ("regression",))
    return Targets(torch.from_numpy(values.astype(np.float32)), task, 1)


def _binary(request: OwnData, values: Any, what: str) -> Targets:
    """Return the classes 0 and 1 by ``positive-values``."""
    positive, notes = _positive(request, values, what)
    task = chosen_task(request, "binary", ("binary", "classification"))
    outputs = 1 if task.name == "binary" else 2
    return Targets(torch.from_numpy(positive.astype(np.int64)), task, outputs, ("negative", "positive"), notes)


def _positive(request: OwnData, values: Any, what: str) -> tuple[Any, tuple[str, ...]]:
    """Return which targets count as positive, and a note of positive values that are not there."""
    absent: list[str] = []
    text = request.positive_values.strip()
    if values.ndim != 1:
        raise ConfigError(f"positive-values={text!r} is for one target; {what} have {values.shape[1]}.")
    found = [str(v) for v in np.unique(values).tolist()]
    if text.startswith(">"):
        try:
            bound = float(text[1:])
            positive = values.astype(float) > bound
        except ValueError as error:
            raise ConfigError(
                f"positive-values={text!r}: > needs a number, and numbers in {what} (found: {shown(found)})."
            ) from error
    else:
        wanted = listed(text)
        as_text = np.array([_plain(v) for v in values.tolist()])
        absent = [entry for entry in wanted if entry not in as_text]
        if len(absent) == len(wanted) and len(found) > 1:  # a hospital may have one value only
            raise ConfigError(f"positive-values={text!r}: {shown(wanted)} not found in {what} (found: {shown(found)}).")
        positive = np.isin(as_text, wanted)
    if not positive.any() and len(found) > 1:
        raise ConfigError(f"positive-values={text!r}: none of the values of {what} is positive ({shown(found)}).")
    notes = (f"positive-values: {shown(absent)} not found in {what} (found: {shown(found)})",) if absent else ()
    return positive, notes


def _plain(value: Any) -> str:
    """Return a value as a user writes it: 1.0 as 1."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _missing(values: Any) -> Any:
    if values.dtype.kind == "f":
        return ~np.isfinite(values)
    if values.dtype.kind == "O":
        return np.vectorize(lambda v: v is None or v != v, otypes=[bool])(values)
    return np.zeros(values.shape, bool)

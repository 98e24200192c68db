"""Targets of own data, from the values of a column or array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.names import listed, one_form
from fedbn_flwr.lab.data.own.features import as_text
from fedbn_flwr.lab.data.own.records import Targets
from fedbn_flwr.lab.data.own.request import OwnData, chosen_task, numbered_classes, oddly_written, shown

__all__ = ["read_targets"]

_MOST_CLASSES = 1000
_FEW = 20  # values that may be classes


def read_targets(
    request: OwnData,
    values: Any,
    what: str,
    row: Callable[[int], str] = "row {} (counted from 0)".format,
    names: Sequence[str] = (),
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
    values = _in_one_form(np.asarray(values))
    _refuse_missing(request, values, what, row)
    if values.ndim == 2 and values.shape[1] == 1 and request.task != "multi-label":
        values = values[:, 0]
    if request.positive_values:
        return _binary(request, values, what)
    if values.ndim == 2:
        return _several(request, values, what, row)
    if values.ndim != 1:
        raise request.problem(f"{what} have shape {values.shape}; (N,) or (N, K) needed.")
    kind = values.dtype.kind
    are_text, are_whole = kind not in "biuf", kind in "biu"
    as_numbers = request.task == "regression" and not are_text
    if not as_numbers and (are_text or are_whole or _are_labels(request, values, what)):
        return _classes(request, values, what, are_text, names)
    task = chosen_task(request, "regression", ("regression",))
    return Targets(torch.from_numpy(values.astype(np.float32)), task, 1)


def _in_one_form(values: Any) -> Any:
    """Return text in one form, so that a class has one name; other values as they are."""
    if values.dtype.kind not in "UO":
        return values
    texts = np.empty(values.shape, dtype=object)
    for at, value in np.ndenumerate(values):
        texts[at] = one_form(value) if isinstance(value, str) else value
    return texts


def _refuse_missing(request: OwnData, values: Any, what: str, row: Callable[[int], str]) -> None:
    missing = np.zeros(values.shape, bool)
    if values.dtype.kind == "f":
        missing = ~np.isfinite(values)
    elif values.dtype.kind == "O":
        missing = np.vectorize(lambda value: value is None or value != value, otypes=[bool])(values)
    if missing.any():
        first = int(np.argwhere(missing)[0][0])
        remedy = "Leave these examples out, or fill them in."
        if request.kind == "csv":
            remedy = (
                f"A value is missing where the cell is empty or one of missing-values={request.missing_values}. Leave "
                "these examples out, fill them in, or set missing-values without the text that is a class here."
            )
        raise request.problem(
            f"{int(missing.sum())} of the {len(values)} values of {what} are missing or infinite; the first is in "
            f"{row(first)}. {remedy}"
        )


def _are_labels(request: OwnData, values: Any, what: str) -> bool:
    """Return whether numbers with a decimal point are classes: whole ones are if the config asks for classes.

    Without a task in the config 0 and 1 are classes, and fractions are not.

    Raises:
        ConfigError: the config must say it, or its task does not fit.
    """
    whole, different = bool(np.all(np.mod(values, 1) == 0)), np.unique(values)
    if whole and (request.task or request.num_classes or np.isin(different, (0, 1)).all()):
        return True
    if request.task:
        raise ConfigError(
            f"task={request.task} does not fit {what} of dataset={request.name!r}: numbers with fractions "
            f"({_shown(values[:3])}) are for task=regression."
        )
    if whole and len(different) <= _FEW:
        raise ConfigError(
            f"dataset={request.name!r}: {what} are whole numbers with a decimal point ({_shown(different)}): set "
            "task=classification if they are classes, task=regression if not."
        )
    return False


def _classes(request: OwnData, values: Any, what: str, are_text: bool, known: Sequence[str]) -> Targets:
    """Return classes; numbers below the number of classes are those of the classes, others are numbered in their order.

    Where the config does not state how many classes there are, the numbers must begin at 0: 1 and 2 are numbered, too.
    """
    different = len(np.unique(values))
    if are_text and not (request.classes or known) and (odd := oddly_written(values.tolist())):
        raise request.problem(f"{what} are {odd}, or state them as class-names.")
    if different > _MOST_CLASSES and different > len(values) // 2:
        raise request.problem(
            f"{what} have {different} different values in {len(values)} examples, which are no classes. Use another "
            "label-column, or task=regression for numbers."
        )
    stated = request.num_classes or (2 if request.task == "binary" else 0)
    lowest = 0 if are_text else values.min()
    in_range = lowest == 0 or (stated and lowest > 0)  # a hospital may lack class 0, as it may lack another
    if not request.classes and not are_text and in_range and values.max() < (stated or _MOST_CLASSES):
        labels, names = values.astype(np.int64), tuple[str, ...]()
        count = int(labels.max()) + 1
    else:
        entries = values.tolist() if are_text else [int(value) for value in values]
        labels, names = numbered_classes(request, entries, what, known)
        count = len(names)
    task = chosen_task(request, "classification", ("classification", "binary") if count <= 2 else ("classification",))
    if request.num_classes and request.num_classes < count:
        raise ConfigError(
            f"num-classes={request.num_classes} is fewer than the {count} classes in {what} of "
            f"dataset={request.name!r}."
        )
    outputs = max(count, request.num_classes)
    if task.name == "binary":
        outputs = 1
    elif outputs < 2:
        raise request.problem(f"{what} have one class only ({_shown(values[:1])}).")
    return Targets(torch.from_numpy(labels), task, outputs, names)


def _several(request: OwnData, values: Any, what: str, row: Callable[[int], str]) -> Targets:
    """Return labels or numbers, several for each example, or the classes of one-hot rows."""
    if values.dtype.kind not in "biuf":
        raise request.problem(f"{what} hold text; several targets must be numbers.")
    are_labels = bool(np.isin(values, (0, 1)).all())
    others = np.flatnonzero(values.sum(1) != 1)
    one_hot = are_labels and not len(others)
    if one_hot and not request.task:
        raise ConfigError(
            f"dataset={request.name!r}: {what} have a single 1 in each row: set task=classification if each example "
            "is of one class, task=multi-label if several labels could be true."
        )
    if one_hot and request.task == "classification":
        return _of_columns(request, values, what)
    if are_labels and request.task == "classification":
        raise ConfigError(
            f"task=classification does not fit {what} of dataset={request.name!r}: {row(int(others[0]))} has "
            f"{int(values[others[0]].sum())} labels. Several labels are for task=multi-label."
        )
    allowed = ("multi-label", "regression") if are_labels else ("regression",)
    task = chosen_task(request, allowed[0], allowed)
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


def _binary(request: OwnData, values: Any, what: str) -> Targets:
    """Return the classes 0 and 1 by ``positive-values``, and a note of those of them that are not there."""
    text, different = request.positive_values.strip(), np.unique(values)
    if values.ndim != 1:
        raise ConfigError(f"positive-values={text!r} is for one target; {what} have {values.shape[1]}.")
    absent, has_others = list[str](), len(different) > 1  # a hospital may have one value only
    if text.startswith(">"):
        try:
            positive = values.astype(float) > float(text[1:])
        except ValueError as error:
            raise ConfigError(
                f"positive-values={text!r}: > needs a number, and numbers in {what} (found: {_shown(different)})."
            ) from error
    else:
        wanted, written = listed(text), np.array([as_text(value) for value in values.tolist()])
        positive, absent = np.isin(written, wanted), [entry for entry in wanted if entry not in written]
        if len(absent) == len(wanted) and has_others:
            raise ConfigError(
                f"positive-values={text!r}: {shown(wanted)} not found in {what} (found: {_shown(different)})."
            )
    if not positive.any() and has_others:
        raise ConfigError(f"positive-values={text!r}: none of the values of {what} is positive ({_shown(different)}).")
    task = chosen_task(request, "binary", ("binary", "classification"))
    note = f"positive-values: {shown(absent)} not found in {what} (found: {_shown(different)})"
    return Targets(
        torch.from_numpy(positive.astype(np.int64)),
        task,
        num_classes=1 if task.name == "binary" else 2,
        class_names=("negative", "positive"),
        notes=(note,) if absent else (),
    )


def _shown(values: Any) -> str:
    return shown([str(value) for value in values])

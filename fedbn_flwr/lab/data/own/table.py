"""Tables: the columns of a CSV or parquet file, or of a folder with a table for each client."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data.names import listed, one_form
from fedbn_flwr.lab.data.own.arrays import as_tests
from fedbn_flwr.lab.data.own.features import (
    FILE,
    features_of,
    numbered_column,
    refuse_lists_and_dates,
    row_of,
    stated_features,
)
from fedbn_flwr.lab.data.own.records import Records, Targets
from fedbn_flwr.lab.data.own.request import OwnData, shown
from fedbn_flwr.lab.data.own.table_files import read_tables
from fedbn_flwr.lab.data.own.targets import read_targets
from fedbn_flwr.lab.data.splits import Indices

__all__ = ["read_table"]

_NAMELESS = re.compile(r"Unnamed: \d+|__index_level_\d+__")  # pandas' names; as a rule the numbers of the rows


def read_table(request: OwnData) -> Records:
    """Return the rows of a table.

    Numbers are features as they are, text becomes a feature 0 or 1 for each category. ``client-column``, or the name of
    the file in a folder of tables, is the client of a row.

    Raises:
        ConfigError: a column of the config is not in the table; the message names the nearest.
        DataError: a file cannot be read, tables have other columns, or values are missing.
    """
    table, from_files, notes_of_files = read_tables(request)
    columns = [str(name) for name in table.columns]
    stated = stated_features(request.feature_columns, columns)
    used = {
        "label-column": _one(request.label_column) if request.label_column in columns else listed(request.label_column),
        "client-column": _one(request.client_column),
        "group-column": _one(request.group_column),
        "split-column": _one(request.split_column),
    }
    _refuse_unusable(request, columns, {**used, "feature-columns": [name for name, _ in stated]}, from_files)
    if not len(table):
        raise DataError(f"dataset={request.name!r} has no rows.")
    targets = _targets(request, table, used["label-column"])
    tests = as_tests(request, _values(table[request.split_column]), "split-column") if request.split_column else None
    taken = {FILE}.union(*used.values())
    if both := [name for name, _ in stated if name in taken]:
        raise ConfigError(
            f"feature-columns names {shown(both)}, which another key (label-, client-, group- or split-column) uses: "
            "remove it there."
        )
    free = [name for name in columns if name not in taken]
    nameless = [] if stated else list(filter(_NAMELESS.fullmatch, free))
    inputs = features_of(request, table, stated or [(name, ()) for name in free if name not in nameless], tests)
    clients, client_names = _numbered(request, table, FILE if from_files else request.client_column)
    units, unit_names = _numbered(request, table, request.group_column)
    notes = [f"column {name!r} has no name in the file and is left out" for name in nameless]
    return Records(
        inputs=inputs,
        targets=targets,
        clients=clients,
        client_names=client_names,
        units=units,
        unit_names=unit_names,
        tests=tests,
        notes=(*notes_of_files, *notes),
    )


def _one(column: str) -> list[str]:
    return [one_form(column)] if column else []


def _refuse_unusable(
    request: OwnData, columns: Sequence[str], used: Mapping[str, Sequence[str]], from_files: bool
) -> None:
    """Raise ConfigError unless the keys name columns of the table, and one is the target."""
    problems = []
    for key, names in used.items():
        for name in (name for name in names if name not in columns):
            near = difflib.get_close_matches(name, columns, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It has {shown(columns, 20)}."
            problems.append(f"{key}={name!r} is not a column of dataset={request.name!r}. {hint}")
    if not used["label-column"]:
        problems.append(f"label-column is not set: name the target among the columns {shown(columns, 20)}.")
    if from_files and request.client_column:
        problems.append(
            f"client-column={request.client_column!r}: dataset={request.name!r} has a file for each client."
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _targets(request: OwnData, table: Any, labels: list[str]) -> Targets:
    """Return the targets from the column, or columns, of these names."""
    refuse_lists_and_dates(request, table, labels)
    values = _values(table[labels[0]] if len(labels) == 1 else table[labels])
    targets = read_targets(request, values, f"column {request.label_column!r}", functools.partial(row_of, table))
    return replace(targets, class_names=tuple(labels)) if len(labels) > 1 else targets


def _numbered(request: OwnData, table: Any, column: str) -> tuple[Indices | None, tuple[str, ...]]:
    """Return the number of the client, or the unit, of each row and the names by number; none may be missing."""
    if not column:
        return None, ()
    return numbered_column(request, column, table[column].astype(object).where(table[column].notna(), None).tolist())


def _values(column: Any) -> Any:
    """Return numbers as they are, text stripped, missing values among others as None."""
    import pandas as pd

    values = column.to_numpy()
    if values.dtype.kind in "biuf":
        return values
    cleaned = np.empty(values.shape, dtype=object)
    for at, value in np.ndenumerate(values):
        cleaned[at] = one_form(value) if isinstance(value, str) else value
        if pd.isna(value):
            cleaned[at] = None
    return cleaned

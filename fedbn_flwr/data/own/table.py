"""Tables: a CSV or parquet file, or a folder with a table for each client."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbn_flwr.data.own.arrays import as_tests
from fedbn_flwr.data.own.request import Found, OwnData, numbered, shown
from fedbn_flwr.data.own.targets import read_targets
from fedbn_flwr.errors import ConfigError, DataError

__all__ = ["features_of", "read_table", "stated_features", "table_columns"]

SUFFIXES = (".csv", ".tsv", ".parquet")
MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null", "None")
"""Texts in a CSV file that mean a missing value."""

_MOST_CATEGORIES = 50
_CLIENT = "(file)"
_NAMELESS = re.compile(r"Unnamed: \d+|__index_level_\d+__")  # pandas' names; as a rule the numbers of the rows


def read_table(request: OwnData) -> Found:
    """Return the rows of a table.

    Numbers are features as they are, text becomes a feature 0 or 1 for each category. ``client-column``, or the name of
    the file in a folder of tables, is the client of a row.

    Raises:
        ConfigError: a column of the config is not in the table; the message names the nearest.
        DataError: a file cannot be read, tables have other columns, or values are missing.
    """
    table, from_files = _tables(request)
    columns = [str(name) for name in table.columns]
    label_columns = _names(request.label_column)
    used = {
        "label-column": label_columns,
        "client-column": _names(request.client_column),
        "group-column": _names(request.group_column),
        "split-column": _names(request.split_column),
        "feature-columns": [name for name, _ in stated_features(request.feature_columns, columns)],
    }
    problems = [
        f"{key}={name!r} is not a column of dataset={request.name!r}. {_near(name, columns)}"
        for key, names in used.items()
        for name in names
        if name not in columns
    ]
    if not label_columns:
        problems.append(f"label-column is not set: name the target among the columns {shown(columns, 20)}.")
    if from_files and request.client_column:
        problems.append(
            f"client-column={request.client_column!r}: dataset={request.name!r} has a file for each client."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    if not len(table):
        raise DataError(f"dataset={request.name!r} has no rows.")
    values = table[label_columns[0]] if len(label_columns) == 1 else table[label_columns]
    targets, task, outputs, class_names = read_targets(
        request, _values(values), f"column {request.label_column!r}", functools.partial(_row, table)
    )
    if len(label_columns) > 1:
        class_names = tuple(label_columns)
    tests = as_tests(request, _values(table[request.split_column]), "split-column") if request.split_column else None
    taken = {name for key, names in used.items() if key != "feature-columns" for name in names} | {_CLIENT}
    nameless = [n for n in columns if _NAMELESS.fullmatch(n) and n not in taken and not request.feature_columns]
    wanted = stated_features(request.feature_columns, columns)
    wanted = wanted or [(n, ()) for n in columns if n not in {*taken, *nameless}]
    if both := [name for name, _ in wanted if name in taken]:
        raise ConfigError(f"feature-columns: {shown(both)} is used by another key; a feature cannot be that, too.")
    inputs, names, notes = features_of(request, table, wanted, tests)
    notes = (*(f"column {name!r} has no name in the file and is left out" for name in nameless), *notes)
    client = _CLIENT if from_files else request.client_column
    clients, client_names = numbered(_keys(request, table, client)) if client else (None, ())
    return Found(
        inputs,
        targets,
        task,
        outputs,
        class_names,
        clients,
        client_names,
        numbered(_keys(request, table, request.group_column))[0] if request.group_column else None,
        tests,
        names,
        notes=notes,
    )


def table_columns(request: OwnData) -> list[str]:
    """Return the columns of a table, of the first one in a folder.

    Raises:
        DataError: there is no such file, or it cannot be read.
    """
    path = request.existing()
    files = _files(path) if path.is_dir() else [path]
    return [str(name) for name in _table(request, files[0], rows=1).columns] if files else []


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def _tables(request: OwnData) -> tuple[Any, bool]:
    """Return the table, and whether it is from a folder of tables, whose names are in the column ``(file)``."""
    import pandas as pd

    path = request.existing()
    if not path.is_dir():
        return _table(request, path), False
    files = _files(path)
    if not files:
        raise DataError(
            f"dataset={request.name!r} has no tables ({', '.join(SUFFIXES)}); it has "
            f"{shown(sorted(p.name for p in path.iterdir()))}."
        )
    if len({file.stem for file in files}) < len(files):
        raise DataError(f"dataset={request.name!r}: two tables have the same name ({shown([f.name for f in files])}).")
    tables = [_table(request, file) for file in files]
    for file, table in zip(files, tables, strict=True):
        if not len(table):
            raise DataError(f"dataset={request.name!r}: {file.name} has no rows.")
        if set(table.columns) != set(tables[0].columns):
            different = sorted(map(str, set(table.columns) ^ set(tables[0].columns)))
            raise DataError(
                f"dataset={request.name!r}: {file.name} and {files[0].name} differ in the columns {shown(different)}."
            )
    # A column may be text in one file and numbers in another: then it is text in all.
    for name in tables[0].columns:
        if len({pd.api.types.is_numeric_dtype(t[name]) for t in tables if t[name].notna().any()}) > 1:
            for table in tables:
                table[name] = table[name].map(lambda v: None if pd.isna(v) else _as_text(v))
    whole = pd.concat(
        [t[list(tables[0].columns)].assign(**{_CLIENT: f.stem}) for f, t in zip(files, tables, strict=True)],
        ignore_index=True,
    )
    return whole, True


def _table(request: OwnData, path: Path, rows: int | None = None) -> Any:
    import pandas as pd

    try:
        if not path.stat().st_size:
            raise DataError(f"dataset={request.name!r}: {path} is empty.")
        if path.suffix.lower() == ".parquet":
            return pd.read_parquet(path)
        separator = "\t" if path.suffix.lower() == ".tsv" else None
        table = pd.read_csv(
            path,
            sep=separator,
            engine="python",
            na_values=list(MISSING),
            keep_default_na=False,
            skipinitialspace=True,
            encoding="utf-8-sig",
            nrows=rows,
        )
    except DataError:
        raise
    except UnicodeError as error:
        raise DataError(f"dataset={request.name!r}: {path} is not UTF-8 ({error}). Save it as UTF-8.") from error
    except (OSError, ValueError, ImportError) as error:  # pandas' parser errors are ValueErrors
        raise DataError(f"dataset={request.name!r}: {path} cannot be read: {error}") from error
    except Exception as error:  # csv.Error and Arrow's errors have no common base
        raise DataError(f"dataset={request.name!r}: {path} cannot be read: {type(error).__name__}: {error}") from error
    table.columns = [str(name).strip() for name in table.columns]
    if twice := sorted(set(table.columns[table.columns.duplicated()])):
        raise DataError(f"dataset={request.name!r}: {path} has two columns {shown(twice)}. Rename one of them.")
    return table


def stated_features(text: str, columns: Sequence[str] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """Return (column, categories) of a comma list ``age,sex:F|M``; () for numbers, and for text as it is found."""
    found = []
    for entry in _names(text):
        name, _, categories = (entry, "", "") if entry in columns else entry.partition(":")
        found.append((name.strip(), tuple(c.strip() for c in categories.split("|") if c.strip())))
    return found


def features_of(
    request: OwnData, table: Any, wanted: list[tuple[str, tuple[str, ...]]], tests: Any
) -> tuple[torch.Tensor, tuple[str, ...], tuple[str, ...]]:
    """Return the features float32 (N, F), their names, and notes; a missing value is NaN.

    Categories that are not stated are those of all rows, or of the training rows of ``split-column``. Text that is none
    of them is 0 in all its features, as missing text is with ``missing=mean``.

    Raises:
        DataError: values are missing and ``missing`` is "refuse", or a column has no usable values.
    """
    import pandas as pd

    columns: list[Any] = []
    names: list[str] = []
    notes: list[str] = []
    problems: list[str] = []
    in_training = np.ones(len(table), bool) if tests is None else ~tests
    for name, categories in wanted:
        column = table[name]
        missing = int(column.isna().sum())
        if missing == len(table):
            problems.append(f"column {name!r} has no values at all: leave it out of feature-columns")
            continue
        if missing and request.missing == "refuse":
            first = int(np.flatnonzero(column.isna())[0])
            where = _row(table, first)
            problems.append(f"column {name!r}: {missing} of {len(table)} values are missing (first in {where})")
            continue
        if pd.api.types.is_numeric_dtype(column) and not categories:
            values = column.to_numpy(dtype=np.float64, na_value=np.nan)
            with np.errstate(over="ignore"):
                rounded = values.astype(np.float32)
            if np.isinf(rounded).any():
                problems.append(f"column {name!r} has infinite values, or values above 3e38")
            kept, known = (len(np.unique(part[~np.isnan(part)])) for part in (rounded, values))
            if 10 * kept < 9 * known:
                problems.append(
                    f"column {name!r}: its {known} different values are {kept} in float32 (such as {values[0]:.17g}); "
                    "subtract a constant from it, a date or time say"
                )
            columns.append(values)
            names.append(name)
            continue
        text = column.map(lambda v: None if pd.isna(v) else _as_text(v))
        texts = sorted({v for v in text if not pd.isna(v)})
        odd = [value for value in texts if not _is_number(value)]
        if 0 < len(odd) < len(texts) and not categories:
            where = _row(table, int(np.flatnonzero(text == odd[0])[0]))
            problems.append(
                f"column {name!r} has numbers and text ({shown(odd)}; first in {where}): correct it (missing is one of "
                f"{', '.join(MISSING[1:])} or nothing), or state its categories, {name}:A|B"
            )
            continue
        kinds = categories or tuple(sorted({v for v in text[in_training] if not pd.isna(v)}))
        if len(kinds) > _MOST_CATEGORIES and not categories:
            problems.append(
                f"column {name!r} is text with {len(kinds)} different values (such as {shown(kinds, 3)}): leave it out "
                f"of feature-columns, or state its categories, {name}:A|B"
            )
            continue
        other = sorted({v for v in text if not pd.isna(v)} - set(kinds))
        if other:
            notes.append(f"column {name!r}: {shown(other)} is none of the categories and counts as none")
        notes.append(f"column {name!r} is text: {len(kinds)} features ({shown(kinds)})")
        columns += [(text == kind).to_numpy(dtype=np.float64) for kind in kinds]
        names += [f"{name}={kind}" for kind in kinds]
    if problems:
        way = "\nUse missing=mean for the mean of the training rows, or other feature-columns."
        way = way if any(" are missing " in problem for problem in problems) else ""
        raise DataError(f"dataset={request.name!r}:\n" + "\n".join(problems) + way)
    if not columns:
        raise DataError(f"dataset={request.name!r} has no columns for features; set feature-columns.")
    if filled := int(np.isnan(np.stack(columns)).sum()):
        notes.append(f"{filled} missing values are replaced by the mean of the training rows (missing=mean)")
    return torch.from_numpy(np.stack(columns, 1).astype(np.float32)), tuple(names), tuple(notes)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _row(table: Any, at: int) -> str:
    """Return where a row is, counted from 0, in its own file if there are several."""
    if _CLIENT not in table.columns:
        return f"row {at}"
    file = table[_CLIENT].iloc[at]
    return f"row {at - int(np.flatnonzero(table[_CLIENT] == file)[0])} of {file}"


def _as_text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def _keys(request: OwnData, table: Any, column: str) -> list[Any]:
    """Return the values of a column that names clients or patients; none may be missing."""
    values = table[column]
    if missing := int(values.isna().sum()):
        raise DataError(f"dataset={request.name!r}: {missing} values of column {column!r} are missing.")
    return [_as_text(value) if isinstance(value, (str, float)) else value for value in values.tolist()]


def _values(column: Any) -> Any:
    values = column.to_numpy()
    return values if values.dtype.kind in "biuf" else _as_objects(values)


def _as_objects(values: Any) -> Any:
    """Return text stripped, missing values as None, others as they are."""
    import pandas as pd

    flat = [None if pd.isna(v) else v.strip() if isinstance(v, str) else v for v in values.flat]
    found = np.empty(len(flat), dtype=object)
    found[:] = flat
    return found.reshape(values.shape)


def _names(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _near(name: str, columns: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, columns, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"It has {shown(columns, 20)}."

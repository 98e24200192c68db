"""Tables: a CSV or parquet file, or a folder with a table for each client."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr.data.own.arrays import as_tests
from fedbn_flwr.data.own.features import (
    FILE,
    MISSING,
    as_text,
    features_of,
    listed,
    refuse_lists_and_dates,
    row_of,
    stated_features,
    with_numbers,
)
from fedbn_flwr.data.own.request import Found, OwnData, left_out, numbered, shown
from fedbn_flwr.data.own.targets import read_targets
from fedbn_flwr.errors import ConfigError, DataError

__all__ = ["read_table", "table_columns"]

SUFFIXES = (".csv", ".tsv", ".parquet")
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
    label_columns = listed(request.label_column)
    used = {
        "label-column": label_columns,
        "client-column": listed(request.client_column),
        "group-column": listed(request.group_column),
        "split-column": listed(request.split_column),
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
    refuse_lists_and_dates(request, table, label_columns)
    values = table[label_columns[0]] if len(label_columns) == 1 else table[label_columns]
    targets, task, outputs, class_names, notes_of_targets = read_targets(
        request, _values(values), f"column {request.label_column!r}", functools.partial(row_of, table)
    )
    if len(label_columns) > 1:
        class_names = tuple(label_columns)
    tests = as_tests(request, _values(table[request.split_column]), "split-column") if request.split_column else None
    taken = {name for key, names in used.items() if key != "feature-columns" for name in names} | {FILE}
    nameless = [n for n in columns if _NAMELESS.fullmatch(n) and n not in taken and not request.feature_columns]
    wanted = stated_features(request.feature_columns, columns)
    wanted = wanted or [(n, ()) for n in columns if n not in {*taken, *nameless}]
    if both := [name for name, _ in wanted if name in taken]:
        raise ConfigError(
            f"feature-columns names {shown(both)}, which another key (label-, client-, group- or split-column) uses: "
            "remove it there."
        )
    inputs, names, notes, warnings = features_of(request, table, wanted, tests)
    notes = (
        *_notes_of_others(request),
        *(f"column {name!r} has no name in the file and is left out" for name in nameless),
        *notes_of_targets,
        *notes,
    )
    client = FILE if from_files else request.client_column
    clients, client_names = numbered(_keys(request, table, client)) if client else (None, ())
    return Found(
        inputs=inputs,
        targets=targets,
        task=task,
        num_classes=outputs,
        class_names=class_names,
        clients=clients,
        client_names=client_names,
        units=numbered(_keys(request, table, request.group_column))[0] if request.group_column else None,
        tests=tests,
        feature_names=names,
        notes=notes,
        warnings=warnings,
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


def _notes_of_others(request: OwnData) -> tuple[str, ...]:
    path = request.existing()
    inside = path.iterdir() if path.is_dir() else ()
    others = [p.name for p in inside if p.is_file() and not p.name.startswith(".")]
    return left_out(request, [name for name in others if Path(name).suffix.lower() not in SUFFIXES])


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
                table[name] = table[name].map(lambda v: None if pd.isna(v) else as_text(v))
    whole = pd.concat(
        [t[list(tables[0].columns)].assign(**{FILE: f.stem}) for f, t in zip(files, tables, strict=True)],
        ignore_index=True,
    )
    return whole, True


def _table(request: OwnData, path: Path, rows: int | None = None) -> Any:
    import pandas as pd

    header = None
    try:
        if not path.stat().st_size:
            raise DataError(f"dataset={request.name!r}: {path} is empty.")
        if path.suffix.lower() == ".parquet":
            return with_numbers(pd.read_parquet(path))
        read: dict[str, Any] = {"engine": "python", "skipinitialspace": True, "encoding": "utf-8-sig"}
        read["sep"] = "\t" if path.suffix.lower() == ".tsv" else None
        header = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False, **read)
        with warnings.catch_warnings():  # by default pandas takes the first of too many values for a row's name
            warnings.simplefilter("error", pd.errors.ParserWarning)
            read |= {"na_values": list(MISSING), "keep_default_na": False, "index_col": False}
            table = pd.read_csv(path, nrows=rows, **read)
    except DataError:
        raise
    except pd.errors.ParserWarning as error:
        raise DataError(
            f"dataset={request.name!r}: rows of {path} have more values than the first has names. Name each column."
        ) from error
    except UnicodeError as error:
        raise DataError(f"dataset={request.name!r}: {path} is not UTF-8 ({error}). Save it as UTF-8.") from error
    except (OSError, ValueError, ImportError) as error:  # pandas' parser errors are ValueErrors
        raise DataError(f"dataset={request.name!r}: {path} cannot be read: {error}") from error
    except Exception as error:  # csv.Error and Arrow's errors have no common base
        raise DataError(f"dataset={request.name!r}: {path} cannot be read: {type(error).__name__}: {error}") from error
    table.columns = [str(name).strip() for name in table.columns]
    given = table.columns if header is None else header.iloc[0].str.strip()  # pandas calls a second y y.1
    if twice := sorted({name for name in given[given.duplicated()] if name}):
        raise DataError(f"dataset={request.name!r}: {path} has two columns {shown(twice)}. Rename one of them.")
    return table


def _keys(request: OwnData, table: Any, column: str) -> list[Any]:
    """Return the values of a column that names clients or patients; none may be missing."""
    values = table[column]
    if missing := int(values.isna().sum()):
        raise DataError(f"dataset={request.name!r}: {missing} values of column {column!r} are missing.")
    return [as_text(value) if isinstance(value, (str, float)) else value for value in values.tolist()]


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


def _near(name: str, columns: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, columns, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"It has {shown(columns, 20)}."

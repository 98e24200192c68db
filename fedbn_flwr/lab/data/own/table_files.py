"""The files of tables: one CSV or parquet file, or a folder of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data.names import one_form
from fedbn_flwr.lab.data.own.csv_files import read_csv
from fedbn_flwr.lab.data.own.features import FILE, as_text, with_numbers
from fedbn_flwr.lab.data.own.request import OwnData, left_out, shown

__all__ = ["Tables", "read_tables", "table_columns"]

SUFFIXES = (".csv", ".tsv", ".parquet")


class Tables(NamedTuple):
    """One table made of all; whether it is from a folder, with the file's name in ``(file)``; what a user must know."""

    table: Any
    from_files: bool
    notes: tuple[str, ...]


def table_columns(request: OwnData) -> list[str]:
    """Return the columns of a table, of the first one in a folder.

    Raises:
        DataError: there is no such file, or it cannot be read.
    """
    path = request.existing()
    files = _files_of(path) if path.is_dir() else [path]
    return [str(name) for name in _table(request, files[0], rows=1)[0].columns] if files else []


def read_tables(request: OwnData) -> Tables:
    """Return the rows of a file, or of all files in a folder.

    Raises:
        DataError: a file cannot be read, or tables have other columns.
    """
    path = request.existing()
    request.refuse_odd_names([str(path), *(os.listdir(path) if path.is_dir() else [])])
    if not path.is_dir():
        table, notes = _table(request, path)
        return Tables(table, False, tuple(notes))
    files = _files_of(path)
    if not files:
        raise DataError(
            f"dataset={request.name!r} has no tables ({', '.join(SUFFIXES)}); it has {shown(sorted(os.listdir(path)))}."
        )
    names = [one_form(file.stem) for file in files]
    if len({*names}) < len(files):
        raise request.problem(f"two tables have the same name ({shown([file.name for file in files])}).")
    tables, notes = list[Any](), [*_note_of_others(request, path)]
    for file in files:
        table, of_file = _table(request, file)
        tables.append(table)
        notes += of_file
    for file, table in zip(files, tables, strict=True):
        if not len(table):
            raise request.problem(f"{file.name} has no rows.")
        if different := sorted({*table.columns} ^ {*tables[0].columns}):
            raise request.problem(f"{file.name} and {files[0].name} differ in the columns {shown(different)}.")
    return Tables(_joined(tables, names), True, tuple(notes))


def _note_of_others(request: OwnData, folder: Path) -> tuple[str, ...]:
    """Return the note of files in a folder of tables that are no tables."""
    others = [p.name for p in folder.iterdir() if p.is_file() and not p.name.startswith(".") and not _is_table(p)]
    return left_out(request, others)


def _files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if _is_table(p) and not p.name.startswith("."))


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _joined(tables: list[Any], names: list[str]) -> Any:
    """Return one table; a column that is text in one file and numbers in another becomes text in all."""
    import pandas as pd

    columns = list(tables[0].columns)
    for name in columns:
        kinds = {pd.api.types.is_numeric_dtype(table[name]) for table in tables if table[name].notna().any()}
        if len(kinds) > 1:
            for table in tables:
                table[name] = table[name].map(lambda value: None if pd.isna(value) else as_text(value))
    if len({table.index.name for table in tables}) > 1:  # lines of some, rows of others
        tables = [table.reset_index(drop=True) for table in tables]
    named = [table[columns].assign(**{FILE: name}) for table, name in zip(tables, names, strict=True)]
    return pd.concat(named)


def _table(request: OwnData, path: Path, rows: int | None = None) -> tuple[Any, list[str]]:
    """Return the table in a file, whose index says where its rows are, and what a user must know."""
    import pandas as pd

    try:
        if not path.stat().st_size:
            raise request.problem(f"{path} is empty.")
        if path.suffix.lower() == ".parquet":
            table, notes = pd.read_parquet(path).reset_index(drop=True), list[str]()
            header = list(table.columns)
        else:
            header, table, notes = read_csv(request, path, rows)
    except (ConfigError, DataError):
        raise
    except Exception as error:  # csv.Error and Arrow's errors have no common base
        raise request.problem(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    table.columns = [one_form(str(name)) for name in table.columns]
    given = [one_form(str(name)) for name in header]
    if twice := sorted({name for name in given if name and given.count(name) > 1}):
        raise request.problem(f"{path} has two columns {shown(twice)}. Rename one of them.")
    return with_numbers(table), notes

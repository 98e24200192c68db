"""The files of tables: one CSV or parquet file, or a folder of them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.own.features import FILE, MISSING, as_text, with_numbers
from fedbn_flwr.lab.data.own.request import OwnData, left_out, shown

__all__ = ["notes_of_others", "read_tables", "table_columns"]

SUFFIXES = (".csv", ".tsv", ".parquet")


def table_columns(request: OwnData) -> list[str]:
    """Return the columns of a table, of the first one in a folder.

    Raises:
        DataError: there is no such file, or it cannot be read.
    """
    path = request.existing()
    files = _files_of(path) if path.is_dir() else [path]
    return [str(name) for name in _table(request, files[0], rows=1).columns] if files else []


def read_tables(request: OwnData) -> tuple[Any, bool]:
    """Return the table, and whether it is from a folder of tables, whose names are in the column ``(file)``.

    Raises:
        DataError: a file cannot be read, or tables have other columns.
    """
    path = request.existing()
    if not path.is_dir():
        return _table(request, path), False
    files = _files_of(path)
    if not files:
        raise DataError(
            f"dataset={request.name!r} has no tables ({', '.join(SUFFIXES)}); it has {shown(sorted(os.listdir(path)))}."
        )
    names = [file.stem for file in files]
    if len({*names}) < len(files):
        raise request.problem(f"two tables have the same name ({shown([file.name for file in files])}).")
    tables = [_table(request, file) for file in files]
    for file, table in zip(files, tables, strict=True):
        if not len(table):
            raise request.problem(f"{file.name} has no rows.")
        if different := sorted({*table.columns} ^ {*tables[0].columns}):
            raise request.problem(f"{file.name} and {files[0].name} differ in the columns {shown(different)}.")
    return _joined(tables, names), True


def notes_of_others(request: OwnData) -> tuple[str, ...]:
    """Return the note of files in a folder of tables that are no tables."""
    path = request.existing()
    inside = path.iterdir() if path.is_dir() else ()
    others = [p.name for p in inside if p.is_file() and not p.name.startswith(".") and not _is_table(p)]
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
    named = [table[columns].assign(**{FILE: name}) for table, name in zip(tables, names, strict=True)]
    return pd.concat(named, ignore_index=True)


def _table(request: OwnData, path: Path, rows: int | None = None) -> Any:
    import pandas as pd

    try:
        if not path.stat().st_size:
            raise request.problem(f"{path} is empty.")
        if path.suffix.lower() == ".parquet":
            table = pd.read_parquet(path)
            header = list(table.columns)
        else:
            header, table = _csv(path, rows)
    except DataError:
        raise
    except Exception as error:  # csv.Error and Arrow's errors have no common base
        raise request.problem(_why_unreadable(path, error)) from error
    table.columns = [str(name).strip() for name in table.columns]
    given = [str(name).strip() for name in header]
    if twice := sorted({name for name in given if name and given.count(name) > 1}):
        raise request.problem(f"{path} has two columns {shown(twice)}. Rename one of them.")
    return with_numbers(table)


def _why_unreadable(path: Path, error: Exception) -> str:
    import pandas as pd

    if isinstance(error, pd.errors.ParserWarning):
        return f"rows of {path} have more values than the first has names. Name each column."
    if isinstance(error, UnicodeError):
        return f"{path} is not UTF-8 ({error}). Save it as UTF-8."
    return f"{path} cannot be read: {type(error).__name__}: {error}"


def _csv(path: Path, rows: int | None) -> tuple[list[str], Any]:
    """Return the names in the first line, and the table, in which pandas calls a second y y.1."""
    import pandas as pd

    read: dict[str, Any] = {"engine": "python", "skipinitialspace": True, "encoding": "utf-8-sig"}
    read["sep"] = "\t" if path.suffix.lower() == ".tsv" else None
    header = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False, **read)
    with warnings.catch_warnings():  # by default pandas takes the first of too many values for a row's name
        warnings.simplefilter("error", pd.errors.ParserWarning)
        read |= {"na_values": list(MISSING), "keep_default_na": False, "index_col": False}
        return list(header.iloc[0]), pd.read_csv(path, nrows=rows, **read)

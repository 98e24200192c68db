"""The files of tables: one CSV or parquet file, or a folder of them."""

from __future__ import annotations

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
    return _joined(tables, [file.stem for file in files]), True


def notes_of_others(request: OwnData) -> tuple[str, ...]:
    """Return the note of files in a folder of tables that are no tables."""
    path = request.existing()
    inside = path.iterdir() if path.is_dir() else ()
    others = [p.name for p in inside if p.is_file() and not p.name.startswith(".")]
    return left_out(request, [name for name in others if Path(name).suffix.lower() not in SUFFIXES])


def _files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def _joined(tables: list[Any], names: list[str]) -> Any:
    """Return one table; a column that is text in one file and numbers in another becomes text in all."""
    import pandas as pd

    for name in tables[0].columns:
        if len({pd.api.types.is_numeric_dtype(t[name]) for t in tables if t[name].notna().any()}) > 1:
            for table in tables:
                table[name] = table[name].map(lambda v: None if pd.isna(v) else as_text(v))
    columns = list(tables[0].columns)
    named = [table[columns].assign(**{FILE: name}) for table, name in zip(tables, names, strict=True)]
    return pd.concat(named, ignore_index=True)


def _table(request: OwnData, path: Path, rows: int | None = None) -> Any:
    import pandas as pd

    try:
        if not path.stat().st_size:
            raise DataError(f"dataset={request.name!r}: {path} is empty.")
        if path.suffix.lower() == ".parquet":
            table = pd.read_parquet(path)
            header = list(table.columns)
        else:
            header, table = _csv(path, rows)
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
    given = [str(name).strip() for name in header]
    if twice := sorted({name for name in given if name and given.count(name) > 1}):
        raise DataError(f"dataset={request.name!r}: {path} has two columns {shown(twice)}. Rename one of them.")
    return with_numbers(table)


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

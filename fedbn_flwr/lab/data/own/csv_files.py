"""One CSV file as pandas reads it: its encoding, its delimiter, the lines above its header, and its numbers."""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.names import listed
from fedbn_flwr.lab.data.own.request import OwnData, is_number, shown

__all__ = ["CsvTable", "read_csv"]

_DELIMITERS = ",;\t|~^"
_SAMPLED = 200  # lines from which the delimiter is found
_DECLARED = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)  # Excel's first line
_WITH_COMMA = re.compile(r"\s*[-+]?\d+,\d+(e[-+]?\d+)?\s*", re.IGNORECASE)


class CsvTable(NamedTuple):
    """The names in the header; the table, whose index is the line of each row in the file; what a user must know."""

    header: list[str]
    table: Any
    notes: list[str]


class _Layout(NamedTuple):
    """The delimiter, the number of the header's line, from 1, the names in it, and the text of the lines above it."""

    delimiter: str
    line: int
    header: list[str]
    above: list[str]


class _TooLongError(Exception):
    """A value is longer than ``csv`` reads: the number of its column, from 1, and the line where its row begins."""

    def __init__(self, column: int, line: int) -> None:
        super().__init__(column, line)
        self.column, self.line = column, line


def read_csv(request: OwnData, path: Path, rows: int | None = None) -> CsvTable:
    """Return the table in a file, or its first rows.

    Raises:
        ConfigError: there is no such encoding.
        DataError: the file has another encoding, its rows have more values than the header has names, or a value is
            longer than 131,072 characters.
    """
    text, header = _text(request, path), list[str]()
    try:
        layout = _layout(text, "\t" if path.suffix.lower() == ".tsv" else "")
        header = layout.header
        if not header:
            raise request.problem(f"{path} is empty.")
        return _read(request, path, text, layout, rows)
    except _TooLongError as error:
        name = f" {header[error.column - 1]!r}" if error.column <= len(header) else ""
        raise request.problem(
            f"line {error.line} of {path} has a value of more than {csv.field_size_limit():,} characters in column "
            f'{error.column}{name}. Close the quote (") that is open there; or leave the column of long texts out.'
        ) from error


def _read(request: OwnData, path: Path, text: str, layout: _Layout, rows: int | None) -> CsvTable:
    """Return the table of a text whose layout is known."""
    table, read_as_missing = _parsed(request, path, text, layout, rows)
    lines = [line for line, _ in islice(_records(text, layout.delimiter, layout.line), 1, len(table) + 1)]
    if len(lines) == len(table):
        table.index = lines
        table.index.name = "line"
    notes = []
    if layout.above:
        notes.append(f"lines of {path.name} above its header are left out ({shown(layout.above, 3)})")
    if read_as_missing:
        notes.append(f"read as missing values in {path.name}: {shown(read_as_missing)} (missing-values)")
    return CsvTable(layout.header, table, notes)


def _text(request: OwnData, path: Path) -> str:
    """Return the text of a file: UTF-8, else UTF-16 with its mark, else in the encoding of the config."""
    content = path.read_bytes()
    marked = content[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        text = content.decode("utf-16" if marked else "utf-8-sig")
        if "\0" not in text:
            return text
        raise UnicodeError("it has bytes of value 0, as UTF-16 has")
    except UnicodeError as error:
        if not request.encoding:
            raise request.problem(
                f"{path} is not UTF-8 ({error}). Save it as UTF-8, or name its encoding, such as encoding=cp1252 "
                "(Windows in Western Europe)."
            ) from error
    try:
        return content.decode(request.encoding)
    except LookupError as error:
        raise ConfigError(f"encoding={request.encoding!r} is no encoding that Python knows, such as cp1252.") from error
    except UnicodeError as error:
        raise request.problem(f"{path} is neither UTF-8 nor encoding={request.encoding} ({error}).") from error


def _records(text: str, delimiter: str, first: int = 1) -> Iterator[tuple[int, list[str]]]:
    """Yield line and values of the records from a line on; like pandas, lines of spaces alone are left out.

    Raises:
        _TooLongError: a value has more than 131,072 characters, which ``csv`` does not read.
    """
    lines = _from_line(text, first)
    reader, line = csv.reader(lines, delimiter=delimiter, skipinitialspace=True), first
    try:
        for record in reader:
            if len(record) > 1 or any(value.strip() for value in record):
                yield line, record
            line = first + reader.line_num
    except csv.Error as error:
        raise _TooLongError(_long_column(text, delimiter, line), line) from error


def _from_line(text: str, first: int) -> io.StringIO:
    """Return the text from a line on; the first is 1."""
    lines = io.StringIO(text, newline="")
    for _ in range(first - 1):
        lines.readline()
    return lines


def _long_column(text: str, delimiter: str, line: int) -> int:
    """Return the number of the first column, from 1, whose value in the record at a line is too long."""
    most = csv.field_size_limit(len(text) + 1)
    try:
        record = next(csv.reader(_from_line(text, line), delimiter=delimiter, skipinitialspace=True))
    finally:
        csv.field_size_limit(most)
    return next((at for at, value in enumerate(record, 1) if len(value) > most), len(record))


def _layout(text: str, delimiter: str) -> _Layout:
    """Return delimiter and header of a file: its first line may declare the delimiter, others may be a title."""
    first, declared = 1, _DECLARED.fullmatch(text.splitlines()[0] if text else "")
    if declared:
        first, delimiter = 2, declared[1]
    sample = "".join(islice(io.StringIO(text, newline=""), _SAMPLED))
    delimiter = delimiter or _delimiter(sample)
    records = list[tuple[int, list[str]]]()
    try:
        for record in _records(sample, delimiter, first):
            records.append(record)
    except _TooLongError:
        if not records:  # below a header the error comes with the column's name
            raise
    if not records:
        return _Layout(delimiter, first, [], [])
    widths = Counter(len(record) for _, record in records)
    at = _header_at([record for _, record in records], max(widths, key=lambda width: (widths[width], width)))
    line, header = records[at]
    above = [" ".join(filter(None, record)) for _, record in records[:at]]
    return _Layout(delimiter, line, [name.strip() for name in header], above)


def _delimiter(sample: str) -> str:
    """Return the character that divides most lines into equally many values, the more values the better."""
    best, found = (0, 0), ","
    for delimiter in (*_DELIMITERS, " "):
        if delimiter == " " and best > (0, 0):
            break  # spaces are in texts, too
        widths = _widths(sample, delimiter)
        width, lines = max(widths.items(), key=lambda each: each[::-1], default=(0, 0))
        if width > 1 and (lines, width) > best:
            best, found = (lines, width), delimiter
    return found


def _widths(sample: str, delimiter: str) -> Counter[int]:
    """Return how many lines have so many values, up to the first that is too long: a wide table, undivided, is one."""
    widths = Counter[int]()
    with suppress(_TooLongError):
        for _, record in _records(sample, delimiter):
            widths[len(record)] += 1
    return widths


def _header_at(records: Sequence[list[str]], width: int) -> int:
    """Return which record is the header: the first, unless titles stand above one that names all columns."""
    for at, record in enumerate(records):
        filled = sum(bool(value.strip()) for value in record)
        if len(record) == width and filled > 1:
            return 0 if any(map(is_number, record)) else at
        if filled > 1 and len(record) >= width - 1:
            break  # a header that lacks a name
    return 0


def _parsed(request: OwnData, path: Path, text: str, layout: _Layout, rows: int | None) -> tuple[Any, list[str]]:
    """Return the table, and the texts in it that are missing values."""
    import pandas as pd

    def read(**more: Any) -> Any:
        with warnings.catch_warnings():  # by default pandas takes the first of too many values for a row's name
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(
                io.StringIO(text, newline=""),
                sep=layout.delimiter,
                skiprows=layout.line - 1,
                nrows=rows,
                skipinitialspace=True,
                keep_default_na=False,
                index_col=False,
                low_memory=False,
                **more,
            )

    try:
        table = read(na_values=[""])
        missing = _missing(request, table)
        if missing:
            table = read(na_values=["", *missing])
        if request.decimal == "comma" and _has_commas(table):
            table = read(na_values=["", *missing], decimal=",")
            if points := _columns(table, lambda texts: all(map(is_number, texts))):
                raise request.problem(
                    f"{path} has numbers with a decimal comma in some columns and with a point in {shown(points)}: "
                    "write all with one of them."
                )
    except (pd.errors.ParserWarning, pd.errors.ParserError) as error:
        raise request.problem(_why_unreadable(path, text, layout, error)) from error
    return table, sorted({value.strip() for value in missing})


def _missing(request: OwnData, table: Any) -> list[str]:
    """Return the texts of a table that mean a missing value, as they are written."""
    known, found = {value.casefold() for value in listed(request.missing_values)}, set[str]()
    for texts in _texts(table).values():
        found |= {text for text in texts if text.strip().casefold() in known}
    return sorted(found)


def _has_commas(table: Any) -> bool:
    """Return whether a column has numbers with a decimal comma."""
    return bool(_columns(table, lambda texts: any(map(_WITH_COMMA.fullmatch, texts)) and all(map(_is_decimal, texts))))


def _is_decimal(text: str) -> bool:
    return bool(_WITH_COMMA.fullmatch(text)) or text.strip().lstrip("+-").isdecimal()


def _columns(table: Any, hold: Any) -> list[str]:
    """Return the names of the columns of text whose values hold."""
    return [name for name, texts in _texts(table).items() if texts and hold(texts)]


def _texts(table: Any) -> dict[str, list[str]]:
    """Return the different values of each column of text."""
    import pandas as pd

    texts = {}
    for at, name in enumerate(table.columns):
        column = table.iloc[:, at]
        if not pd.api.types.is_numeric_dtype(column):
            texts[str(name)] = [value for value in column.dropna().unique() if isinstance(value, str)]
    return texts


def _why_unreadable(path: Path, text: str, layout: _Layout, error: Exception) -> str:
    names = len(layout.header)
    for line, record in _records(text, layout.delimiter, layout.line):
        if len(record) > names:
            return (
                f"line {line} of {path} has {len(record)} values, and the header in line {layout.line} has {names} "
                f"names (delimiter {layout.delimiter!r}). Name each column, and put a value with the delimiter in "
                "quotes."
            )
    return f"{path} cannot be read: {error}"

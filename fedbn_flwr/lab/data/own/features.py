"""The features of a table: numbers as they are, text as a feature for each category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.names import listed, one_form
from fedbn_flwr.lab.data.own.records import Inputs
from fedbn_flwr.lab.data.own.request import OwnData, is_number, numbered, oddly_written, shown

__all__ = [
    "FILE",
    "as_text",
    "features_of",
    "note_of_filled",
    "numbered_column",
    "problem_of_numbers",
    "refuse_lists_and_dates",
    "row_of",
    "stated_features",
    "with_numbers",
]

FILE = "(file)"
"""The column with the name of each row's file, where a table is made from several."""

_MOST_CATEGORIES = 50
_SEEN = 100_000  # values of a column that are compared
_TIMES = {"date", "datetime", "datetime64", "period", "time", "timedelta", "timedelta64"}


def stated_features(text: str, columns: Sequence[str] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """Return (column, categories) of a comma list ``age,sex:F|M``; () for numbers, and for text as it is found."""
    features = []
    for entry in listed(text):
        name, _, categories = (entry, "", "") if entry in columns else entry.partition(":")
        features.append((name.strip(), tuple(listed(categories, "|"))))
    return features


def features_of(request: OwnData, table: Any, wanted: list[tuple[str, tuple[str, ...]]], tests: Any) -> Inputs:
    """Return the features float32 (N, F), their names, notes, and warnings; a missing value is NaN.

    Categories that are not stated are those of all rows, or of the training rows of ``split-column``. Text that is none
    of them is 0 in all its features, as missing text is with ``missing=mean``; a warning names it if the categories are
    stated, since another spelling looks the same.

    Raises:
        DataError: values are missing and ``missing`` is "refuse", or a column has no usable values.
    """
    import pandas as pd

    refuse_lists_and_dates(request, table, [name for name, categories in wanted if not categories])
    in_training = np.ones(len(table), bool) if tests is None else ~tests
    features, any_missing = _Features(request, table, in_training), False
    for name, categories in wanted:
        column = table[name]
        missing = int(column.isna().sum())
        if missing == len(table):
            features.problems.append(f"column {name!r} has no values at all: leave it out of feature-columns")
        elif missing and request.missing == "refuse":
            any_missing, first = True, row_of(table, int(np.flatnonzero(column.isna())[0]))
            features.problems.append(
                f"column {name!r}: {missing} of {len(table)} values are missing (first in {first})"
            )
        elif not categories and pd.api.types.is_numeric_dtype(column):
            features.add_numbers(name)
        else:
            features.add_text(name, categories)
    if features.problems:
        way = "\nUse missing=mean for the mean of the training rows, or other feature-columns." if any_missing else ""
        raise DataError(f"dataset={request.name!r}:\n" + "\n".join(features.problems) + way)
    if not features.columns:
        raise DataError(f"dataset={request.name!r} has no columns for features; set feature-columns.")
    values = torch.from_numpy(np.stack(features.columns, 1).astype(np.float32))
    return Inputs(
        values,
        feature_names=tuple(features.names),
        columns=tuple(features.places),
        notes=(*features.notes, *note_of_filled(values)),
        warnings=tuple(features.warnings),
    )


@dataclass
class _Features:
    """The features of a table so far: columns of N numbers, their names, notes, what looks wrong, and what is wrong."""

    request: OwnData
    table: Any
    in_training: Any
    columns: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    places: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add_numbers(self, name: str) -> None:
        """Add a column of numbers, if float32 tells its values apart."""
        values = self.table[name].to_numpy(dtype=np.float64, na_value=np.nan)
        if np.isnan(values).all():
            self.problems.append(f"column {name!r} has no values at all: leave it out")
        elif problem := problem_of_numbers(f"column {name!r}", values):
            self.problems.append(problem)
        self.columns.append(values)
        self.names.append(name)
        self.places.append((name, ""))

    def add_text(self, name: str, stated: tuple[str, ...]) -> None:
        """Add a feature, 0 or 1, for each category of a column of text; () = those of the training rows."""
        import pandas as pd

        text = self.table[name].map(lambda value: None if pd.isna(value) else as_text(value))
        texts, categories = _different(text), stated or _different(text[self.in_training])
        if not stated and (problem := self._problem_of_text(name, text, len(categories))):
            self.problems.append(problem)
            return
        if other := sorted(set(texts) - set(categories)):
            none = f"column {name!r}: {shown(other)} is none of the categories"
            if stated:
                self.warnings.append(
                    f"{none} that feature-columns states ({shown(stated)}); all its features are 0 in "
                    f"{int(text.isin(other).sum())} of {len(text)} rows. Correct the spelling, or state it, too"
                )
            else:
                self.notes.append(f"{none} and counts as none")
        self.notes.append(f"column {name!r} is text: {len(categories)} features ({shown(categories)})")
        self.columns += [(text == category).to_numpy(dtype=np.float64) for category in categories]
        self.names += [f"{name}={category}" for category in categories]
        self.places += [(name, category) for category in categories]

    def _problem_of_text(self, name: str, text: Any, num_categories: int) -> str:
        """Return why the categories of a column cannot be found out from its text; "" if they can."""
        texts = _different(text)
        odd, of_csv = [value for value in texts if not is_number(value)], self.request.kind == "csv"
        first = row_of(self.table, int(np.flatnonzero(text == odd[0])[0])) if odd else ""
        if how := oddly_written(odd):
            key = (
                " set decimal=comma if these are decimal commas,"
                if of_csv and any("," in value for value in odd)
                else ""
            )
            return f"column {name!r} has {how} (first in {first}),{key} or state its categories, {name}:A|B"
        if 0 < len(odd) < len(texts):
            missing = f" (missing is one of missing-values={self.request.missing_values}, or nothing)" if of_csv else ""
            return (
                f"column {name!r} has numbers and text ({shown(odd)}; first in {first}): correct it{missing}, or state "
                f"its categories, {name}:A|B"
            )
        if num_categories > _MOST_CATEGORIES:
            return (
                f"column {name!r} is text with {num_categories} different values (such as {shown(texts, 3)}): leave it "
                f"out of feature-columns, or state its categories, {name}:A|B"
            )
        return ""


def _different(text: Any) -> tuple[str, ...]:
    return tuple(sorted(text.dropna().unique()))


def note_of_filled(inputs: torch.Tensor) -> tuple[str, ...]:
    """Return the note of missing values among inputs; () if there are none."""
    filled = int(inputs.isnan().sum())
    note = f"{filled} missing values are replaced by the mean of the training rows (missing=mean)"
    return (note,) if filled else ()


def problem_of_numbers(what: str, values: Any) -> str:
    """Return why a column of numbers cannot be used: infinite ones, or float32 does not tell them apart; else ""."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if np.isinf(rounded).any():
        return f"{what} has infinite values, or values above 3e38"
    seen = np.flatnonzero(~np.isnan(rounded))[:: len(values) // _SEEN + 1]
    kept, known = len(np.unique(rounded[seen])), len(np.unique(values[seen]))
    if 10 * kept >= 9 * known:
        return ""
    return (
        f"{what}: its {known} different values are {kept} in float32 (such as {values[seen[0]]:.17g}); subtract a "
        "constant from it, a date or time say"
    )


def with_numbers(table: Any) -> Any:
    """Return a table whose columns of Python's decimal numbers, parquet's DECIMAL, are columns of numbers."""
    import pandas as pd

    odd = [name for name in table.columns if table[name].dtype == object]
    decimal = [name for name in odd if pd.api.types.infer_dtype(table[name], skipna=True) == "decimal"]
    return table.assign(**{name: table[name].astype(np.float64) for name in decimal}) if decimal else table


def refuse_lists_and_dates(request: OwnData, table: Any, names: Sequence[str]) -> None:
    """Raise DataError if a column of these names holds lists, or dates or durations."""
    import pandas as pd

    problems = []
    for name in names:
        kind, column = (
            pd.api.types.infer_dtype(table[name], skipna=True),
            f"column {name!r} of dataset={request.name!r}",
        )
        if kind in _TIMES:
            problems.append(f"{column} holds dates or times: subtract a date, or leave it out.")
        elif kind == "mixed" and table[name].map(lambda value: isinstance(value, (list, dict, np.ndarray))).any():
            problems.append(f"{column} holds lists: save one number or text a row, or leave it out.")
    if problems:
        raise DataError("\n".join(problems))


def row_of(table: Any, at: int) -> str:
    """Return where a row is: its line as an editor counts them, or its row counted from 0 in a file without lines."""
    where = f"line {table.index[at]}" if table.index.name == "line" else f"row {table.index[at]} (counted from 0)"
    return f"{where} of {table[FILE].iloc[at]}" if FILE in table.columns else where


def numbered_column(
    request: OwnData, column: str, values: Sequence[Any]
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return the number of the client, or the unit, of each row and the names by number.

    Raises:
        DataError: values are missing (None or NaN).
    """
    if missing := sum(value is None or value != value for value in values):
        raise request.problem(f"{missing} values of column {column!r} are missing.")
    return numbered([as_text(value) if isinstance(value, (str, float)) else value for value in values])


def as_text(value: Any) -> str:
    """Return a value of a table as text: 3.0 is "3"."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else one_form(str(value))

"""The features of a table: numbers as they are, text as a feature for each category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.own.found import Inputs
from fedbn_flwr.lab.data.own.request import OwnData, is_number, listed, numbered, oddly_written, shown

__all__ = [
    "FILE",
    "MISSING",
    "as_text",
    "features_of",
    "note_of_filled",
    "numbered_column",
    "problems_of_numbers",
    "refuse_lists_and_dates",
    "row_of",
    "stated_features",
    "with_numbers",
]

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null", "None")
"""Texts in a CSV file that mean a missing value."""

FILE = "(file)"
"""The column with the name of each row's file, where a table is made from several."""

_MOST_CATEGORIES = 50
_SEEN = 100_000  # values of a column that are compared
_TIMES = {"date", "datetime", "datetime64", "period", "time", "timedelta", "timedelta64"}


def stated_features(text: str, columns: Sequence[str] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """Return (column, categories) of a comma list ``age,sex:F|M``; () for numbers, and for text as it is found."""
    found = []
    for entry in listed(text):
        name, _, categories = (entry, "", "") if entry in columns else entry.partition(":")
        found.append((name.strip(), tuple(c.strip() for c in categories.split("|") if c.strip())))
    return found


@dataclass
class _Features:
    """The features of a table so far: columns of N numbers, their names, notes, what looks wrong, and what is wrong."""

    columns: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


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
    found = _Features()
    in_training = np.ones(len(table), bool) if tests is None else ~tests
    for name, categories in wanted:
        column = table[name]
        missing = int(column.isna().sum())
        if missing == len(table):
            found.problems.append(f"column {name!r} has no values at all: leave it out of feature-columns")
        elif missing and request.missing == "refuse":
            where = row_of(table, int(np.flatnonzero(column.isna())[0]))
            found.problems.append(f"column {name!r}: {missing} of {len(table)} values are missing (first in {where})")
        elif pd.api.types.is_numeric_dtype(column) and not categories:
            _add_numbers(found, name, column)
        else:
            _add_text(found, name, categories, table, in_training)
    if problems := found.problems:
        way = "\nUse missing=mean for the mean of the training rows, or other feature-columns."
        way = way if any(" are missing " in problem for problem in problems) else ""
        raise DataError(f"dataset={request.name!r}:\n" + "\n".join(problems) + way)
    if not found.columns:
        raise DataError(f"dataset={request.name!r} has no columns for features; set feature-columns.")
    features = torch.from_numpy(np.stack(found.columns, 1).astype(np.float32))
    return Inputs(
        features,
        feature_names=tuple(found.names),
        notes=(*found.notes, *note_of_filled(features)),
        warnings=tuple(found.warnings),
    )


def note_of_filled(inputs: torch.Tensor) -> tuple[str, ...]:
    """Return the note of missing values among inputs; () if there are none."""
    filled = int(inputs.isnan().sum())
    note = f"{filled} missing values are replaced by the mean of the training rows (missing=mean)"
    return (note,) if filled else ()


def problems_of_numbers(what: str, values: Any) -> list[str]:
    """Return why a column of numbers cannot be used: infinite ones, or float32 does not tell them apart."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    present = ~np.isnan(rounded)
    if np.isinf(rounded).any():
        return [f"{what} has infinite values, or values above 3e38"]
    rounded, values = (part[present][:: len(values) // _SEEN + 1] for part in (rounded, values))
    if np.array_equal(rounded, values):
        return []
    kept, known = (len(np.unique(part)) for part in (rounded, values))
    if 10 * kept >= 9 * known:
        return []
    return [
        f"{what}: its {known} different values are {kept} in float32 (such as {values[0]:.17g}); subtract a "
        "constant from it, a date or time say"
    ]


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
        kind = pd.api.types.infer_dtype(table[name], skipna=True)
        if kind in _TIMES:
            problems.append(f"column {name!r} of dataset={request.name!r} holds dates or times: subtract a date, or ")
        elif kind == "mixed" and table[name].map(lambda v: isinstance(v, (list, dict, np.ndarray))).any():
            problems.append(
                f"column {name!r} of dataset={request.name!r} holds lists: save one number or text a row, or "
            )
    if problems:
        raise DataError("\n".join(f"{problem}leave it out." for problem in problems))


def _add_numbers(found: _Features, name: str, column: Any) -> None:
    """Add a column of numbers, if float32 tells its values apart."""
    values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isnan(values).all():
        found.problems.append(f"column {name!r} has no values at all: leave it out")
    found.problems += problems_of_numbers(f"column {name!r}", values)
    found.columns.append(values)
    found.names.append(name)


def _add_text(found: _Features, name: str, categories: tuple[str, ...], table: Any, in_training: Any) -> None:
    """Add a feature, 0 or 1, for each category of a column of text; () = those of the training rows."""
    import pandas as pd

    text = table[name].map(lambda v: None if pd.isna(v) else as_text(v))
    texts = sorted({v for v in text if not pd.isna(v)})
    odd = [value for value in texts if not is_number(value)]
    if 0 < len(odd) < len(texts) and not categories:
        where = row_of(table, int(np.flatnonzero(text == odd[0])[0]))
        found.problems.append(
            f"column {name!r} has numbers and text ({shown(odd)}; first in {where}): correct it (missing is one of "
            f"{', '.join(MISSING[1:])} or nothing), or state its categories, {name}:A|B"
        )
        return
    if (how := oddly_written(texts)) and not categories:
        found.problems.append(f"column {name!r} has {how}, or state its categories, {name}:A|B")
        return
    kinds = categories or tuple(sorted({v for v in text[in_training] if not pd.isna(v)}))
    if len(kinds) > _MOST_CATEGORIES and not categories:
        found.problems.append(
            f"column {name!r} is text with {len(kinds)} different values (such as {shown(kinds, 3)}): leave it out "
            f"of feature-columns, or state its categories, {name}:A|B"
        )
        return
    if other := sorted(set(texts) - set(kinds)):
        none = f"column {name!r}: {shown(other)} is none of the categories"
        if categories:
            rows = int(text.isin(other).sum())
            found.warnings.append(
                f"{none} that feature-columns states ({shown(categories)}); all its features are 0 in {rows} of "
                f"{len(table)} rows. Correct the spelling, or state it, too"
            )
        else:
            found.notes.append(f"{none} and counts as none")
    found.notes.append(f"column {name!r} is text: {len(kinds)} features ({shown(kinds)})")
    found.columns += [(text == kind).to_numpy(dtype=np.float64) for kind in kinds]
    found.names += [f"{name}={kind}" for kind in kinds]


def row_of(table: Any, at: int) -> str:
    """Return where a row is, counted from 0, in its own file if there are several."""
    if FILE not in table.columns:
        return f"row {at}"
    file = table[FILE].iloc[at]
    return f"row {at - int(np.flatnonzero(table[FILE] == file)[0])} of {file}"


def numbered_column(
    request: OwnData, column: str, values: Sequence[Any]
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return the number of the client, or the unit, of each row and the names by number.

    Raises:
        DataError: values are missing (None or NaN).
    """
    if missing := sum(value is None or value != value for value in values):
        raise DataError(f"dataset={request.name!r}: {missing} values of column {column!r} are missing.")
    return numbered([as_text(value) if isinstance(value, (str, float)) else value for value in values])


def as_text(value: Any) -> str:
    """Return a value of a table as text: 3.0 is "3"."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()

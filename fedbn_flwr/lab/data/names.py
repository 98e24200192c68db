"""Lists of names in one text: of columns, classes and clients, which may have commas and spaces in them."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable

__all__ = ["as_list", "listed", "one_form"]


def one_form(name: str) -> str:
    """Return a name without spaces around it, in the form NFC: an accent is part of its letter."""
    return unicodedata.normalize("NFC", name.strip())


def listed(text: str, separator: str = ",") -> list[str]:
    """Return the entries of a comma list, stripped, without empty ones; one with a comma stands in quotes, as in CSV.

    Args:
        text: ``north,"Paris, Sud"``, say.
        separator: what is between entries.
    """
    rows = csv.reader([text.strip()], delimiter=separator, skipinitialspace=True)
    return [one_form(entry) for entry in next(rows, []) if entry.strip()]


def as_list(names: Iterable[str]) -> str:
    """Return the comma list of these names, which ``listed`` reads."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(names)
    return text.getvalue()

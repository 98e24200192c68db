"""Lists of names in one text: of clients and classes, which may have commas in them."""

from __future__ import annotations

import csv

__all__ = ["listed"]


def listed(text: str) -> list[str]:
    """Return the entries of a comma list, stripped, without empty ones.

    Args:
        text: ``north,"Paris, Sud"``, say: one with a comma stands in quotes, as in CSV.
    """
    rows = csv.reader([text.strip()], skipinitialspace=True)
    return [entry.strip() for entry in next(rows, []) if entry.strip()]

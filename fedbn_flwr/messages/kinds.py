"""The records of a message, or of a ``Context.state``, of one kind, as a plain dict.

Flower's own ``content.array_records`` makes a checked dict at each access, and writes
each record into the content once more: thirty calls for a record.
"""

from __future__ import annotations

from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

__all__ = ["of_kind"]

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)


def of_kind(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """Return the records of this class by name, in order, in a dict of its own."""
    # Not by isinstance, which for these classes, ABCs, is a call in Python.
    found: dict[str, Record] = {}
    for key, record in content.items():
        if kind in type(record).__mro__:
            found[key] = record  # type: ignore[assignment]
    return found

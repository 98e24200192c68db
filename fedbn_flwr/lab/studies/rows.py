"""Rows of tables: grouped, and as text in Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["csv_text", "grouped", "markdown_table"]

Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by their key, in the order in which the keys come first."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def markdown_table(head: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown; a cell's own bars and line ends do not end it."""
    lines = []
    for cells in (head, *rows):
        texts = [" ".join(str(cell).replace("|", "\\|").split("\n")) for cell in cells]
        lines.append(f"| {' | '.join(texts)} |")
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


def csv_text(fields: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows with these fields as CSV; a missing number is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=fields)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()

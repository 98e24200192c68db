"""Words for numbers and lists in the doctor's sentences."""

from __future__ import annotations

from collections.abc import Collection

from fedbn_flwr.norms.report import shown_path

__all__ = ["listed", "number_of"]


def listed(names: Collection[str]) -> str:
    """Return at most three of the names, and dots for the others; the path of the model itself is empty."""
    return ", ".join(map(shown_path, [*names][:3])) + (", ..." if len(names) > 3 else "")


def number_of(count: int, what: str) -> str:
    """Return "1 client", "2 clients", "1,024 examples"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"

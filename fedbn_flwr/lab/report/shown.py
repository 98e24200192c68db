"""Numbers and settings as a report shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from fedbn_flwr.lab.output.summary import CLIENTS
from fedbn_flwr.training.tasks import in_percent as share

__all__ = [
    "MEANS",
    "MEBIBYTE",
    "duration",
    "form_of",
    "in_percent",
    "metric",
    "scaled",
    "setting",
    "size",
    "thinned",
    "title_of",
    "with_unit",
    "with_unit_of",
]

MEBIBYTE = 2**20
MEANS = ("-weighted", "-seen", "-unseen")
"""Ends of the keys of other means over the clients than the plain one."""
_LARGE = 1e6
_MOST = 60  # rows of a table of rounds

Row = TypeVar("Row")


def in_percent(key: str) -> bool:
    """Return whether a figure of ``metrics.jsonl`` is a share, which the report shows in percent."""
    if key.endswith(CLIENTS):
        return False
    return share(next((key.removesuffix(mean) for mean in MEANS if key.endswith(mean)), key))


def scaled(key: str, value: Any) -> float | None:
    """Return a figure in the unit of the report."""
    if value is None:
        return None
    return 100 * float(value) if in_percent(key) else float(value)


def with_unit_of(key: str) -> str:
    """Return the name of a figure, with its unit."""
    return f"{key} (%)" if in_percent(key) else key


def form_of(key: str) -> str:
    """Return the format of a value in the report's unit: two places for a share in percent, else four."""
    return ".2f" if in_percent(key) else ".4f"


def metric(key: str, value: Any) -> str:
    """Return a value of metrics.jsonl as text, without unit; "-" without a value."""
    number = scaled(key, value)
    if number is None:
        return "-"
    if key.endswith(CLIENTS):
        return f"{value:d}"
    return f"{number:.4g}" if abs(number) >= _LARGE else f"{number:{form_of(key)}}"


def with_unit(key: str, value: Any) -> str:
    """Return a value of metrics.jsonl as text with its unit."""
    unit = "\N{NO-BREAK SPACE}%" if in_percent(key) and value is not None else ""
    return metric(key, value) + unit


def size(count: float) -> str:
    """Return a number of bytes as text."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:,.2f} {unit}"
    return f"{count / 1024:,.2f} GiB"


def title_of(name: str) -> str:
    """Return the name of a figure as a title begins with it."""
    known = {"auroc": "AUROC", "auprc": "AUPRC", "mae": "MAE", "miou": "mIoU"}
    return known.get(name, name[:1].upper() + name[1:])


def duration(seconds: float) -> str:
    """Return a time as text."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def setting(value: Any) -> str:
    """Return the value of a config key as YAML would hold it."""
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


def thinned(rows: Sequence[Row], most: int = _MOST) -> Sequence[Row]:
    """Return at most ``most`` rows, evenly spaced from the first one, and the last one."""
    step = math.ceil(len(rows) / most)
    return rows if step <= 1 else [*rows[:-1:step], rows[-1]]

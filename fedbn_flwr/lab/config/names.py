"""The names that keys take, as ``fedbn-flwr list`` shows them.

The registries need torch: ``make generate`` writes their names into ``names.json``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

__all__ = ["CENTRALIZED", "NAMES_FILE", "allowed", "rows"]

CENTRALIZED = "centralized"
NAMES_FILE = "names.json"
_REGISTRY_OF = {
    "strategy": "strategies",
    "norm": "norms",
    "dataset": "datasets",
    "partition": "partitions",
}


@functools.cache
def _content() -> dict[str, Any]:
    text = Path(__file__).with_name(NAMES_FILE).read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def rows(registry: str) -> list[tuple[str, str, str]]:
    """Return (name, summary, source) of each entry of a registry.

    Args:
        registry: strategies, norms, models, datasets or partitions.
    """
    return [(name, summary, source) for name, summary, source in _content()[registry]]


def allowed(key: str) -> Collection[str]:
    """Return the names that a key takes.

    Args:
        key: strategy, norm, dataset, partition, task, or a role of methods.
    """
    if key in _REGISTRY_OF:
        return [name for name, _, _ in rows(_REGISTRY_OF[key])]
    names: list[str] = _content()["allowed"][key]
    return names

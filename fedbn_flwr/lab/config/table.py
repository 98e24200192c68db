"""What ``make generate`` writes down of the keys, names and methods, so that a command can answer without torch.

``table.json`` has, read from the classes of the package:

- ``keys``: of each config key the default, and the type and limits, as a schema of pydantic-core; null where a function
  checks the value.
- ``registries``: of each registry the (name, summary, source) of its entries, as ``fedbn-flwr list`` shows them.
- ``methods``: of each strategy the fields that its checks read; null where its default settings are refused.
- ``datasets``: of each data set the number of classes and the task. ``models``: whether a model's outputs are by pixel.
- ``allowed``: the names that some other keys take.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

__all__ = ["CENTRALIZED", "TABLE_FILE", "rows", "table"]

CENTRALIZED = "centralized"
TABLE_FILE = "table.json"


@functools.cache
def table() -> dict[str, Any]:
    """Return the table."""
    content: dict[str, Any] = json.loads(Path(__file__).with_name(TABLE_FILE).read_text(encoding="utf-8"))
    return content


def rows(registry: str) -> list[tuple[str, str, str]]:
    """Return (name, summary, source) of each entry of a registry: strategies, norms, models, datasets, partitions."""
    return [(name, summary, source) for name, summary, source in table()["registries"][registry]]

"""The table of methods and protections in the guide *privacy*: what works, and why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedbn_flwr.privacy import masked_sums
from fedbn_flwr.strategies import STRATEGIES, FedAvg

__all__ = ["privacy_table"]

Refusals = Callable[[FedAvg[Any]], Sequence[str]]

PROTECTIONS: Mapping[str, tuple[str, Refusals]] = {
    "differential privacy of clients": ("dp-metrics", lambda method: list(method.beside_updates().values())),
    "masked sums": ("masked-metrics", masked_sums.uncovered),
}


def privacy_table() -> str:
    """Return a table of the strategies with their default settings: "works", or the reason of the refusal."""
    lines = [f"| method | {' | '.join(PROTECTIONS)} |", "|---" * (1 + len(PROTECTIONS)) + "|"]
    for name, kind in STRATEGIES.items():
        method = kind()
        cells = []
        for metrics, refusals in PROTECTIONS.values():
            works = f"works; tests by the clients need `{metrics}=published`" if method.local else "works"
            cells.append("; ".join(refusals(method)) or works)
        lines.append(f"| [`{name}`](../methods/{name}.md) | {' | '.join(cells)} |")
    return "\n".join(lines)

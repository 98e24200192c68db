"""The table of methods and protections in the guide *privacy*: what works, and why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedbn_flwr.privacy import masked_sums
from fedbn_flwr.strategies import STRATEGIES, FedAvg

__all__ = ["privacy_table"]

Refusals = Callable[[FedAvg[Any]], Sequence[str]]

PUBLISHED = "dp-metrics=published"
PROTECTIONS: Mapping[str, Refusals] = {
    "differential privacy of clients": lambda method: list(method.beside_updates().values()),
    "masked sums": masked_sums.uncovered,
}


def privacy_table() -> str:
    """Return a table of the strategies with their default settings: "works", or the reason of the refusal."""
    lines = [f"| method | {' | '.join(PROTECTIONS)} |", "|---" * (1 + len(PROTECTIONS)) + "|"]
    for name, kind in STRATEGIES.items():
        method = kind()
        works = f"works; tests by the clients need `{PUBLISHED}`" if method.local else "works"
        cells = ["; ".join(refusals(method)) or works for refusals in PROTECTIONS.values()]
        lines.append(f"| [`{name}`](../methods/{name}.md) | {' | '.join(cells)} |")
    return "\n".join(lines)

"""The table of methods and protections in the guide *privacy*: what works, and why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedbn_flwr.privacy.uncovered import beside_models, beside_sums
from fedbn_flwr.strategies import STRATEGIES, FedAvg

__all__ = ["privacy_table"]


def _of_clients(method: FedAvg[Any]) -> str:
    return "; ".join(method.beside_updates().values()) or _works(method, "dp-metrics=published")


def _of_records(method: FedAvg[Any]) -> str:
    if refused := beside_models(method, "the model"):
        return "; ".join(refused)
    if method.freezes_bn:
        return "works with BatchNorm frozen from round 1 (`freeze-at=0`), or with noise of clients until T*"
    if method.needs(method.params):
        return "it is for BatchNorm in train mode, which mixes the examples of a batch"
    return "works without BatchNorm in train mode"


def _masked(method: FedAvg[Any]) -> str:
    return "; ".join(beside_sums(method)) or _works(method, "masked-metrics=published")


def _works(method: FedAvg[Any], setting: str) -> str:
    return f"works; tests by the clients need `{setting}`" if method.local else "works"


PROTECTIONS: Mapping[str, Callable[[FedAvg[Any]], str]] = {
    "differential privacy of clients": _of_clients,
    "of records": _of_records,
    "masked sums": _masked,
}


def privacy_table() -> str:
    """Return a table of the strategies with their default settings: "works", or the reason of the refusal."""
    lines = [f"| method | {' | '.join(PROTECTIONS)} |", "|---" * (1 + len(PROTECTIONS)) + "|"]
    for name, kind in STRATEGIES.items():
        cells = [cell(kind()) for cell in PROTECTIONS.values()]
        lines.append(f"| [`{name}`](../methods/{name}.md) | {' | '.join(cells)} |")
    return "\n".join(lines)

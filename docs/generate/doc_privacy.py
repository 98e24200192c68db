"""The table of methods under differential privacy: what works, and why not."""

from __future__ import annotations

from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.runs.protection import disclosures
from fedbn_flwr.strategies import STRATEGIES

__all__ = ["privacy_table"]


def _cell(methods: Methods) -> str:
    sent = [disclosure.text for disclosure in disclosures(methods)]
    works = "works"
    if methods.local:
        works = "works, with `eval-on=global`"
    return "; ".join(sent) or works


def privacy_table() -> str:
    """Return a table of the strategies with their default settings: "works", or the
    reason of the refusal. Strategies with equal cells share a row.
    """
    names: dict[str, list[str]] = {}
    for name, kind in STRATEGIES.items():
        names.setdefault(_cell(kind().methods), []).append(f"`{name}`")
    lines = ["| method | differential privacy of clients |", "|---|---|"]
    lines += [f"| {', '.join(alike)} | {cell} |" for cell, alike in names.items()]
    return "\n".join(lines)

"""The table of methods and protections in the guide *privacy*: what works, and why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedbn_flwr.server.methods.check_protections import disclosures
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.strategies import STRATEGIES

__all__ = ["privacy_table"]


def _of_clients(methods: Methods) -> str:
    sent = [disclosure.text for disclosure in disclosures(methods)]
    return "; ".join(sent) or _works(methods)


def _masked(methods: Methods) -> str:
    return "; ".join(
        disclosure.text for disclosure in disclosures(methods) if not disclosure.masked
    ) or _works(methods)


def _works(methods: Methods) -> str:
    return (
        "works, with `eval-on=global`: tests by the clients are withheld"
        if methods.local
        else "works"
    )


PROTECTIONS: Mapping[str, Callable[[Methods], str]] = {
    "differential privacy of clients": _of_clients,
    "masked sums": _masked,
}


def privacy_table() -> str:
    """Return a table of the strategies with their default settings: "works", or the
    reason of the refusal. Strategies with equal cells share a row.
    """
    lines = [
        f"| method | {' | '.join(PROTECTIONS)} |",
        "|---" * (1 + len(PROTECTIONS)) + "|",
    ]
    names: dict[tuple[str, ...], list[str]] = {}
    for name, kind in STRATEGIES.items():
        cells = tuple(cell(kind().methods) for cell in PROTECTIONS.values())
        names.setdefault(cells, []).append(f"`{name}`")
    for (left, right), alike in names.items():
        cells = (left, "the same" if right == left != "works" else right)
        lines.append(f"| {', '.join(alike)} | {' | '.join(cells)} |")
    return "\n".join(lines)

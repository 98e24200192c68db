"""The section *What travels* of a method's page, from the method's declaration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.server.methods.method import Facts, Method
from fedbn_flwr.server.methods.phases import ALL, Extra, PartSet, Phase

__all__ = ["cost_of", "travels_section"]

_WORDS = {
    Part.AFFINE: "gamma and beta",
    Part.STATISTICS: "running statistics",
    Part.COUNTERS: "counters",
    Part.REST: "all other entries",
    Part.PERSONAL: "the entries that `personal` names",
}
_RECORDS = {
    "trainable": "as many floats as the shared trainable entries",
    "moments": "count, mean and sum of squared deviations of each BN layer",
    "channels": "a number for each BN channel",
    "local": "a copy of what stays with the client",
    "scalar": "a number",
}


def travels_section(method: Method[Any, Any]) -> list[str]:
    """Return the section, one list for each phase that differs from the phase before."""
    lines = ["## What travels", ""]
    phases = method.declared
    for phase in phases:
        lines += [f"In phase *{phase.name}*:", ""] if len(phases) > 1 else []
        lines += [*(f"- {what}: {text}" for what, text in _rows(method, phase)), ""]
    return lines[:-1]


def cost_of(method: Method[Any, Any]) -> str:
    """Return the cost of a round, phase by phase."""
    costs: dict[str, list[str]] = {}
    for phase in method.declared:
        costs.setdefault(_cost(method, phase), []).append(phase.name)
    if len(costs) == 1:
        return f"{next(iter(costs))} a round."
    return (
        "; ".join(
            f"{cost} a round in phase *{'*, *'.join(phases)}*"
            for cost, phases in costs.items()
        )
        + "."
    )


def _rows(method: Method[Any, Any], phase: Phase) -> Iterator[tuple[str, str]]:
    shared = _shared(phase.local)
    down = [
        f"`{extra.key}`: {_RECORDS[extra.size]}, not in round 1"
        for extra in phase.extras
        if _goes_down(method, extra)
    ]
    up = [f"`{extra.key}`: {_RECORDS[extra.size]}" for extra in phase.extras]
    step = (
        ["the vectors of the exchanges, for each BN layer of the first step"]
        if phase.exchanges
        else []
    )
    before_test = ["before a test: the whole state"] if phase.reestimates else []
    moments = (
        ["before a test: the moments of each BN layer"] if phase.reestimates else []
    )
    frozen = f"{_listed(phase.frozen)} unchanged" if phase.frozen else ""
    sent_down = "; ".join([shared, *down, *step, *before_test])
    sent_up = "; ".join(filter(None, [shared, frozen, *up, *step, *moments]))
    if sent_down == sent_up:
        yield "sent down and up", sent_down
    else:
        yield "sent down", sent_down
        yield "sent up", sent_up
    if kept := "; ".join(filter(None, [_listed(phase.local), phase.keeps])):
        yield "kept", kept
    if phase.weights != "examples":
        yield "weights", _weights(phase.weights)


def _goes_down(method: Method[Any, Any], extra: Extra) -> bool:
    """Return whether the server sends the record as well."""
    if extra.size == "scalar":
        return False
    start: Any = method.State
    asks = method.on_clients(start(), Facts(2, None, split_state({}), {}))
    return any(extra.key in ask.sends for ask in asks)


def _shared(local: PartSet) -> str:
    if local == ALL:
        return "nothing (the whole state once, at a client's start)"
    if not local:
        return "the whole state"
    return (
        f"the state without {_listed(local)} (the whole state once, at a client's"
        " start)"
    )


def _listed(parts: PartSet) -> str:
    if parts == ALL:
        return "the whole state"
    return ", ".join(_WORDS[part] for part in Part if part in parts)


def _weights(weights: str) -> str:
    return weights if weights == "equal" else f"by the metric `{weights}`"


def _cost(method: Method[Any, Any], phase: Phase) -> str:
    floats = {(): "$F$", tuple(sorted(ALL)): "nothing"}.get(
        tuple(sorted(phase.local)), "$F - F_l$"
    )
    copies = [extra for extra in phase.extras if extra.size == "trainable"]
    copies_down, copies_up = sum(_goes_down(method, one) for one in copies), len(copies)
    step = ""
    if phase.exchanges:
        # mean and variance of each layer, and their two gradients
        exchanges, step = "$3L + 1$", _plus(2, "S")
        if getattr(method, "backward", "global") != "global":
            exchanges, step = "$2L + 1$", _plus(1, "S")
    down = f"{floats}{_plus(copies_down, 'T')}{step}"
    up = f"{floats}{_plus(copies_up, 'T')}{step}"
    text = f"{down} floats down, {up} up per client"
    if phase.exchanges:
        text += f"; {exchanges} exchanges"
    if phase.reestimates:
        text += "; before a test $F$ down, $S$ up per client"
    return text


def _plus(times: float, symbol: str) -> str:
    if not times:
        return ""
    return f" + ${'' if times == 1 else f'{times:g}'}{symbol}$"

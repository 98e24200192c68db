"""Rules for one client among the others; each is one function, from the measurements to a finding."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedbn_flwr.doctor import remedies, situations
from fedbn_flwr.doctor.each_client import Compared
from fedbn_flwr.doctor.findings import Finding, listed
from fedbn_flwr.doctor.measured import Measured

__all__ = ["client_below", "client_classes", "client_inputs", "client_units", "clients_named"]

_SHOWN = 3


def client_units(m: Measured) -> Finding | None:
    """The inputs of a client have another scale, or another centre."""
    scale, centre = m.each.scale, m.each.centre
    if scale is None or centre is None or not (odd := m.each.other_units):
        return None
    evidence = [
        f"Client {m.names[k]}: its inputs vary {math.exp(scale.values[k]):.3g} times as much as those of the other "
        f"clients, and their centre is {centre.values[k]:+.3g} of the usual spread away.{_score(m, k)}"
        for k in odd[:_SHOWN]
    ]
    what = f"{clients_named(m.names, odd)}: the inputs are in other units than those of the other clients."
    numbers = _numbers(m, odd, {"scale": scale, "centre": centre})
    return Finding("client-units", what, evidence, numbers, remedies.CLIENT_UNITS)


def client_inputs(m: Measured) -> Finding | None:
    """The inputs of a client look different to BatchNorm, in the same units."""
    inputs = m.each.inputs
    if inputs is None or not (odd := m.each.other_inputs):
        return None
    evidence = [
        f"Client {m.names[k]}: the inputs of BatchNorm are {inputs.values[k]:.2f} standard deviations from the usual "
        f"ones; the median over the clients is {_median(inputs):.2f}.{_score(m, k)}"
        for k in odd[:_SHOWN]
    ]
    what = f"{clients_named(m.names, odd)}: the inputs look different from those of the other clients."
    return Finding("client-inputs", what, evidence, _numbers(m, odd, {"inputs": inputs}), remedies.CLIENT_INPUTS)


def client_classes(m: Measured) -> Finding | None:
    """A client has other classes than the other clients have."""
    mix = m.each.mix
    if mix is None or not (odd := m.each.other_mix):
        return None
    evidence = [
        f"Client {m.names[k]}: its class mix is {mix.values[k]:.2f} away from the usual one (total variation, 0 to 1); "
        f"the median over the clients is {_median(mix):.2f}.{_score(m, k)}"
        for k in odd[:_SHOWN]
    ]
    what = f"{clients_named(m.names, odd)}: the class mix differs from that of the other clients."
    chosen = situations.label_skew(m.training.local_steps).remedies
    return Finding("client-classes", what, evidence, _numbers(m, odd, {"class-mix": mix}), chosen)


def client_below(m: Measured) -> Finding | None:
    """A client is far below the others, and neither units nor the inputs of BatchNorm say why."""
    if not (odd := m.each.worse):
        return None
    if (below := m.each.below) is not None:
        evidence = [
            f"Client {m.names[k]}: accuracy {m.accuracy[k]:.3f}; its classes have "
            f"{m.accuracy[k] + below.values[k]:.3f} at the other clients."
            for k in odd[:_SHOWN]
        ]
        numbers = _numbers(m, odd, {"below": below})
    else:
        usual = sorted(m.loss)[(len(m.loss) - 1) // 2]
        evidence = [
            f"Client {m.names[k]}: loss {m.loss[k]:.4g}; the median over the clients is {usual:.4g}."
            for k in odd[:_SHOWN]
        ]
        numbers = _numbers(m, odd, {"loss-above": m.each.loss})
    what = (
        f"{clients_named(m.names, odd)}: far below the others. Its inputs or labels differ; these measures cannot say "
        "which."
    )
    return Finding("client-below", what, evidence, numbers, remedies.CLIENT_BELOW)


def clients_named(names: Sequence[str], chosen: Sequence[int]) -> str:
    """Return "Client 3", "Clients 1, 3"."""
    return f"Client{'s' if len(chosen) > 1 else ''} {listed([names[k] for k in chosen])}"


def _score(m: Measured, k: int) -> str:
    """Return what the client scores on its examples, where that is known."""
    if not m.accuracy:
        return ""
    return f" Its accuracy is {m.accuracy[k]:.3f}, the median {sorted(m.accuracy)[(len(m.accuracy) - 1) // 2]:.3f}."


def _median(measure: Compared) -> float:
    return sorted(measure.values)[(len(measure.values) - 1) // 2]


def _numbers(m: Measured, odd: Sequence[int], measures: dict[str, Compared | None]) -> dict[str, object]:
    found: dict[str, object] = {"clients": [m.names[k] for k in odd]}
    found |= {name: [one.values[k] for k in odd] for name, one in measures.items() if one is not None}
    if m.accuracy:
        found["accuracy"] = [m.accuracy[k] for k in odd]
    return found

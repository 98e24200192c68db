"""The bars of a run: by domain, and by client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.lab.report.figures import Drawing, bars_of
from fedbn_flwr.lab.report.page import Figure, Section, Table
from fedbn_flwr.lab.report.run_files import RunFiles
from fedbn_flwr.lab.report.shown import metric, scaled, with_unit_of
from fedbn_flwr.lab.studies.numbers import with_std
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, VALIDATION
from fedbn_flwr.training.tasks import quantity_of

__all__ = ["clients_section", "domains_section"]

_TESTED = ("own-", "global-", f"{VALIDATION}-")
_MOST_BARS = 60  # clients; with more there is a histogram

Line = Mapping[str, Any]


def domains_section(run: RunFiles) -> Section | None:
    """Return the bars by domain of the result; None where there are no domains."""
    last: Line = next((line for line in reversed(run.lines) if line.get("domains")), {})
    domains: Mapping[str, Mapping[str, float | None]] = run.final.get("domains") or last.get("domains") or {}
    if not domains:
        return None
    quantity = quantity_of(run.headline if run.headline in domains else next(iter(domains)))
    groups = {key: _scaled(key, values) for key, values in domains.items() if quantity_of(key) == quantity}
    names = list(dict.fromkeys(name for values in domains.values() for name in values))
    rows = [[name, *(metric(key, values.get(name)) for key, values in domains.items())] for name in names]
    numbers = Table(["domain", *map(with_unit_of, domains)], rows)
    label = f"Bars of {', '.join(groups)} for each of {len(names)} domains: {_sentence(groups)}."
    title = f"By domain, round {run.final.get('round', last.get('round'))}"
    return Section("domains", "Domains", [Figure(bars_of(groups, quantity), label, title, numbers)])


def clients_section(run: RunFiles) -> Section | None:
    """Return the clients' own tests of the last tested round; None where clients do not test."""
    tested = {line["round"]: line["clients"] for line in run.lines if line.get("clients")}
    if not tested:
        return None
    number = run.final.get("round")
    number = number if number in tested else max(tested)
    tests: Mapping[str, Mapping[str, Any]] = tested[number]
    keys = dict.fromkeys(key for metrics in tests.values() for key in metrics)
    counts = [key for key in (f"own-{NUM_EXAMPLES}", f"{VALIDATION}-{NUM_EXAMPLES}") if key in keys]
    metrics = [key for key in keys if key.startswith(_TESTED) and not key.endswith(NUM_EXAMPLES)]
    if not metrics:
        return None
    score = run.headline.removeprefix("personal-")
    if score == run.headline or score not in metrics:
        score = next((key for key in metrics if not key.endswith("-loss")), metrics[0])
    quantity = quantity_of(score)
    rows, groups = [], {key: dict[str, float | None]() for key in metrics if quantity_of(key) == quantity}
    groups = {score: groups[score], **groups}  # it comes first
    names = {str(at): name for at, name in enumerate(run.json("split.json").get("clients", ()))}
    for client in sorted(tests, key=_numbers_first):
        values, name = tests[client], names.get(client, client)
        label = f"client {client}" if name == client else name
        shown = [metric(key, values.get(key)) for key in metrics]
        rows.append([label, *shown, *(f"{values.get(key, 0):.0f}" for key in counts)])
        for key, group in groups.items():
            group[label] = scaled(key, values.get(key))
    head = ["client", *map(with_unit_of, metrics), *(key.replace("-num-", " ") for key in counts)]
    if len(tests) > _MOST_BARS:
        known = [value for value in groups[score].values() if value is not None]
        low, high = (min(known), max(known)) if known else (0.0, 0.0)
        label = f"Histogram of {score} over {len(tests)} clients, from {low:.2f} to {high:.2f}."
        drawing = _histogram(known, with_unit_of(score))
    else:
        label = f"Bars of {', '.join(groups)} for each of {len(tests)} clients: {_sentence({score: groups[score]})}."
        drawing = bars_of(groups, quantity)
    title = f"By client, round {number}"
    return Section("clients", "Clients", [Figure(drawing, label, title, Table(head, rows))])


def _numbers_first(name: str) -> tuple[bool, int, str]:
    return not name.isdigit(), int(name) if name.isdigit() else 0, name


def _histogram(values: Sequence[float], title: str) -> Drawing:
    trace = {
        "type": "histogram",
        "x": list(values),
        "nbinsx": 30,
        "marker": {"color": "--c0"},
        "hovertemplate": "%{x}: %{y} clients<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": title}}, "yaxis": {"title": {"text": "clients"}}, "bargap": 0.05}
    return {"data": [trace], "layout": layout, "height": 300}


def _scaled(key: str, values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: scaled(key, value) for name, value in values.items()}


def _sentence(groups: Mapping[str, Mapping[str, float | None]]) -> str:
    values = [pair for group in groups.values() for pair in group.items()]
    return "; ".join(f"{name} {with_std(value, None, '.2f')}" for name, value in values)

"""The bars of a run: by domain, and by client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.lab.report.figures import bars
from fedbn_flwr.lab.report.page import Figure, Section, Table
from fedbn_flwr.lab.report.run_files import RunFiles
from fedbn_flwr.lab.report.shown import in_percent, metric, scaled, unit_of
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
    main = [key for key in domains if key == run.headline] or list(domains)
    quantity = quantity_of(main[0])
    shown = {key: values for key, values in domains.items() if quantity_of(key) == quantity}
    groups = {key: {name: scaled(key, value) for name, value in values.items()} for key, values in shown.items()}
    names = list(dict.fromkeys(name for values in domains.values() for name in values))
    rows = [[name, *(metric(key, values.get(name)) for key, values in domains.items())] for name in names]
    numbers = Table(["domain", *(f"{key}{unit_of(key)}" for key in domains)], rows)
    round_of = run.final.get("round", last.get("round"))
    label = f"Bars of {', '.join(shown)} for each of {len(names)} domains: {_sentence(groups)}."
    drawing = bars(groups, f"{quantity}{unit_of(quantity)}", ".1f" if in_percent(quantity) else ".3f")
    return Section("domains", "Domains", [Figure(drawing, label, f"By domain, round {round_of}", numbers)])


def clients_section(run: RunFiles) -> Section | None:
    """Return the clients' own tests of the last tested round; None where clients do not test."""
    wanted = run.final.get("round")
    tested = [line for line in run.lines if line.get("clients")]
    line = next((line for line in tested if line["round"] == wanted), tested[-1] if tested else None)
    if line is None:
        return None
    tests: Mapping[str, Mapping[str, Any]] = line["clients"]
    numbers = sorted(tests, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
    score = run.headline.removeprefix("personal-") if run.headline.startswith("personal-") else ""
    keys = list(dict.fromkeys(key for metrics in tests.values() for key in metrics if key.startswith(_TESTED)))
    keys = [key for key in keys if not key.endswith(NUM_EXAMPLES)]
    if not keys:
        return None
    score = score if score in keys else next((key for key in keys if not key.endswith("-loss")), keys[0])
    quantity = quantity_of(score)
    alike = [score, *(key for key in keys if key != score and quantity_of(key) == quantity)]
    named = _client_names(run)
    labels = {name: named.get(name, f"client {name}") for name in numbers}
    groups = {key: {labels[n]: scaled(key, tests[n].get(key)) for n in numbers} for key in alike}
    counts = [
        key for key in (f"own-{NUM_EXAMPLES}", f"{VALIDATION}-{NUM_EXAMPLES}") if any(key in m for m in tests.values())
    ]
    rows = [
        [
            labels[name],
            *(metric(key, tests[name].get(key)) for key in keys),
            *(f"{tests[name].get(key, 0):.0f}" for key in counts),
        ]
        for name in numbers
    ]
    head = ["client", *(f"{key}{unit_of(key)}" for key in keys), *(key.replace("-num-", " ") for key in counts)]
    title = f"By client, round {line['round']}"
    if len(numbers) > _MOST_BARS:
        values = [value for value in groups[score].values() if value is not None]
        low, high = (min(values), max(values)) if values else (0.0, 0.0)
        label = f"Histogram of {score} over {len(numbers)} clients, from {low:.2f} to {high:.2f}."
        drawing = _histogram(values, f"{score}{unit_of(score)}")
    else:
        label = f"Bars of {', '.join(alike)} for each of {len(numbers)} clients: {_sentence({score: groups[score]})}."
        drawing = bars(groups, f"{quantity}{unit_of(quantity)}", ".1f" if in_percent(quantity) else ".3f")
    return Section("clients", "Clients", [Figure(drawing, label, title, Table(head, rows))])


def _histogram(values: Sequence[float], title: str) -> dict[str, Any]:
    trace = {"type": "histogram", "x": list(values), "nbinsx": 30, "marker": {"color": "--c0"}}
    trace["hovertemplate"] = "%{x}: %{y} clients<extra></extra>"
    layout = {"xaxis": {"title": {"text": title}}, "yaxis": {"title": {"text": "clients"}}, "bargap": 0.05}
    return {"data": [trace], "layout": layout, "height": 300}


def _client_names(run: RunFiles) -> dict[str, str]:
    names = run.json("split.json").get("clients", [])
    return {str(at): name for at, name in enumerate(names) if name != str(at)}


def _sentence(groups: Mapping[str, Mapping[str, float | None]]) -> str:
    return "; ".join(
        f"{name} {'-' if value is None else format(value, '.2f')}" for v in groups.values() for name, value in v.items()
    )

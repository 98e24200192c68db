"""The pictures of the clients: their tests, by domain and by client, and their data, by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.partitioned.splitting import count_split, read_split
from fedbn_flwr.lab.report.figures import Drawing, bars_of, heatmap
from fedbn_flwr.lab.report.page import Block, Figure, Section, Table, Text
from fedbn_flwr.lab.report.run_files import RunFiles
from fedbn_flwr.lab.report.shown import metric, scaled, with_unit_of
from fedbn_flwr.lab.studies.numbers import with_std
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, VALIDATION
from fedbn_flwr.training.tasks import quantity_of

__all__ = ["clients_section", "domains_section", "split_figures", "split_section"]

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
    rows = []
    for name in names:
        cells = [metric(key, values.get(name)) for key, values in domains.items()]
        rows.append([name, *cells])
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


def split_section(run: RunFiles) -> Section:
    """Return the class-by-client picture."""
    return Section("split", "Data of the clients", split_figures(run))


def split_figures(run: RunFiles, ending: str = "") -> list[Block]:
    """Return the pictures from ``split.json``, or from the data in a folder of an older version.

    The counts of a protected run are left out: epsilon and masks do not cover them.

    Args:
        run: the run.
        ending: ends the titles.
    """
    if run.config.protected:
        return [Text("The counts of the clients are left out, because the run protects their data.", "note")]
    try:
        saved = run.json("split.json")
        clients, tables = read_split(saved) if saved else ([], count_split(run.config))
    except (FedBNError, OSError) as error:
        text = f"The folder has no split.json, and the data cannot be read here: {error}"
        return [Text(text, "note")]
    blocks: list[Block] = []
    for table in tables:
        names, kinds = list(clients or map(str, range(len(table.counts)))), list(map(str, table.names))
        sizes, held = table.counts.sum(1), (table.counts > 0).sum(1)
        rows = [[name, *map(str, row), str(sum(row))] for name, row in zip(names, table.counts.tolist(), strict=True)]
        title = f"{table.of.capitalize()} examples by {table.what} and client{ending}"
        label = (
            f"{title}: {len(names)} clients have {sizes.min()} to {sizes.max()} examples each, of {held.min()} to "
            f"{held.max()} of {len(kinds)} kinds."
        )
        drawing = heatmap(table.counts.T.tolist(), names, kinds, titles=("client", table.what, "examples"))
        blocks.append(Figure(drawing, label, title, Table(["client", *kinds, "all"], rows)))
    return blocks


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

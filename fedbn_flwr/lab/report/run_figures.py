"""The figures of a run: its curves, the tests of its clients, by domain and by client, and their data, by class."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedbn_flwr.lab.output.summary import CLIENTS, HELD_OUT
from fedbn_flwr.lab.partitioned.splitting import MAX_CLIENTS, read_split
from fedbn_flwr.lab.report.figures import UNITS, Drawing, Mark, Series, bars_of, curves, heatmap
from fedbn_flwr.lab.report.files import RunFiles
from fedbn_flwr.lab.report.page import Block, Figure, Section, Switch, Table, Text
from fedbn_flwr.lab.report.shown import MEANS, metric, scaled, thinned, title_of, with_unit_of
from fedbn_flwr.lab.studies.rows import grouped, with_std
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, VALIDATION
from fedbn_flwr.training.tasks import quantity_of

__all__ = [
    "SWITCH",
    "by_round",
    "clients_section",
    "curves_section",
    "domains_section",
    "marks",
    "split_figures",
    "test_of",
]

Line = Mapping[str, Any]
Column = tuple[Sequence[Any], Sequence[float | None]]
_TESTED = ("own-", "global-", f"{VALIDATION}-")
_MOST_BARS = 60  # clients; with more there is a histogram
SWITCH = Switch([(unit, unit) for unit in UNITS])
_TESTS = ("test-", "personal-", f"{VALIDATION}-", f"{HELD_OUT}-", "train-")


def curves_section(run: RunFiles) -> Section:
    """Return a figure for each quantity: the main one first, the loss last."""
    keys = dict.fromkeys(key for line in run.lines for key in line if not key.endswith((CLIENTS, *MEANS)))
    in_order = [key for test in _TESTS for key in keys if key.startswith(test)]
    quantities = grouped(in_order, quantity_of)
    if not quantities:
        return Section("curves", "Curves", [Text(run.lost or "No round is finished yet.")])
    main = quantity_of(run.headline)
    ordered = sorted(quantities, key=lambda name: (name != main, name == "loss", name))
    text = "Exchanges and bytes are those of training: one broadcast counts once, and bytes are those of floats."
    figures = [_curves(run, name, quantities[name]) for name in ordered]
    return Section("curves", "Curves", [SWITCH, *figures, Text(text, "note")])


def test_of(key: str) -> str:
    """Return on what a figure is measured: "test-recalibrated" of "test-recalibrated-accuracy"."""
    return key.removesuffix(f"-{quantity_of(key)}")


def _curves(run: RunFiles, quantity: str, keys: Sequence[str]) -> Figure:
    name = with_unit_of(quantity)
    series = []
    for style, key in enumerate(keys):
        series.append(Series(test_of(key), run.over, [scaled(key, line.get(key)) for line in run.lines], style))
    tested = [line for line in run.lines if any(line.get(key) is not None for key in keys)]
    rows = []
    for line in thinned(tested):
        cells = [metric(key, line.get(key)) for key in keys]
        rows.append([str(line["round"]), *cells])
    left_out = len(tested) - len(rows)
    caption = f"{name} by round" + (f"; {left_out} rounds in between are left out" if left_out else "")
    last = ", ".join(f"{test_of(key)} {metric(key, run.final.get(key))}" for key in keys)
    label = f"Curves of {name} over {len(run.lines)} rounds. Last values: {last}."
    numbers = Table(["round", *map(test_of, keys)], rows, caption)
    return Figure(curves(series, name, marks(run)), label, title_of(quantity), numbers)


def by_round(columns: Mapping[str, Column], shown: Callable[[float | None], str], caption: str = "") -> Table:
    """Return a table with a row for each round; of many rounds some are left out.

    Args:
        columns: by name, the rounds of a column and its value in each.
        shown: returns a value as text.
        caption: that of the table.
    """
    values = [dict(zip(rounds, numbers, strict=True)) for rounds, numbers in columns.values()]
    rows = []
    for server_round in thinned(sorted(set[int]().union(*values))):
        cells = [shown(column.get(server_round)) for column in values]
        rows.append([str(server_round), *cells])
    return Table(["round", *columns], rows, caption)


def marks(run: RunFiles) -> list[Mark]:
    """Return a line after the last round of each phase, where the phase changes, and one at a divergence."""
    names = {}
    for at, (line, after) in enumerate(itertools.pairwise(run.lines)):
        if line.get("phase") != after.get("phase"):
            frozen = after.get("phase") == "frozen"
            names[at] = f"T* = {line['round']}" if frozen else f"{after.get('phase')} from {after['round']}"
    diverged = [at for at, line in enumerate(run.lines) if "diverged" in line]
    places = [*names.items(), *((at, "diverged") for at in diverged[:1])]
    return [Mark(name, {unit: over[at] for unit, over in run.over.items()}) for at, name in places]


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


def split_figures(run: RunFiles, ending: str = "") -> list[Block]:
    """Return the pictures of ``split.json``: each client's examples by class, and by group if there are groups.

    The counts of a protected run are left out: epsilon and masks do not cover them.

    Args:
        run: the run.
        ending: ends the titles.
    """
    if run.config.protected:
        return [Text("The counts of the clients are left out, because the run protects their data.", "note")]
    saved = run.json("split.json")
    if not saved:
        why = f"there are more than {MAX_CLIENTS:,} clients, or only the nodes have the data"
        return [Text(f"The folder has no split.json: {why}.", "note")]
    names, tables = read_split(saved)
    blocks: list[Block] = []
    for table in tables:
        kinds = list(map(str, table.names))
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

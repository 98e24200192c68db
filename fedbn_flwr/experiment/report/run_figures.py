"""The figures of a run: curves, bars by domain and client, and the split of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.experiment.definitions import CLIENTS
from fedbn_flwr.experiment.held_out import HELD_OUT
from fedbn_flwr.experiment.report.figures import BYTES, EXCHANGES, ROUNDS, Mark, Series, bars, curves, heatmap
from fedbn_flwr.experiment.report.page import Block, Figure, Section, Switch, Table, Text
from fedbn_flwr.experiment.report.run_files import RunFiles
from fedbn_flwr.experiment.report.shown import MEANS, in_percent, metric, scaled, thinned, unit_of
from fedbn_flwr.experiment.splitting import count_split, read_split
from fedbn_flwr.messages.protocol import VALIDATION

__all__ = ["UNITS", "clients_section", "curves_section", "domains_section", "marks", "split_section"]

UNITS = ((ROUNDS, "rounds"), (EXCHANGES, "exchanges"), (BYTES, "bytes"))
_TESTS = ("test-", "personal-", f"{VALIDATION}-", f"{HELD_OUT}-", "train-")
_MOST_BARS = 60  # clients; with more there is a histogram

Line = Mapping[str, Any]


def curves_section(run: RunFiles) -> Section:
    """Return a figure for each quantity: the main one first, the loss last."""
    keys = list(dict.fromkeys(key for line in run.lines for key in line if key.startswith(_TESTS)))
    keys = [key for key in keys if not key.endswith((CLIENTS, *MEANS))]
    quantities: dict[str, list[str]] = {}
    for key in sorted(keys, key=lambda key: [key.startswith(prefix) for prefix in _TESTS].index(True)):
        quantities.setdefault(_quantity(key, keys), []).append(key)
    main = _quantity(run.headline, keys)
    ordered = sorted(quantities, key=lambda name: (name != main, name == "loss", name))
    figures = [_curves(run, name, quantities[name]) for name in ordered]
    if not figures:
        return Section("curves", "Curves", [Text("No round is finished yet.")])
    note = Text(
        "Exchanges and bytes are those of training: one broadcast counts once, and bytes are those of floats.", "note"
    )
    return Section("curves", "Curves", [Switch(UNITS), *figures, note])


def _quantity(key: str, keys: Sequence[str]) -> str:
    """Return what a key measures: "accuracy" of "test-recalibrated-accuracy"."""
    names = {"loss", *(other.removeprefix("train-") for other in keys if other.startswith("train-"))}
    names |= {"balanced-accuracy", "macro-f1"}
    found = [name for name in names if key.endswith(f"-{name}")]
    return max(found, key=len) if found else key.rpartition("-")[2]


def _curves(run: RunFiles, quantity: str, keys: Sequence[str]) -> Figure:
    series = [
        Series(
            name=key.removesuffix(f"-{quantity}"),
            over=run.over,
            values=[scaled(key, line.get(key)) for line in run.lines],
            style=at,
        )
        for at, key in enumerate(keys)
    ]
    shown = [line for line in run.lines if any(line.get(key) is not None for key in keys)]
    head = ["round", *(one.name for one in series)]
    rows = [[str(line["round"]), *(metric(key, line.get(key)) for key in keys)] for line in thinned(shown)]
    left = len(shown) - len(rows)
    caption = f"{quantity}{unit_of(quantity)} by round" + (f"; {left} rounds in between are left out" if left else "")
    last = ", ".join(f"{one.name} {metric(key, run.final.get(key))}" for one, key in zip(series, keys, strict=True))
    label = f"Curves of {quantity}{unit_of(quantity)} over {len(run.lines)} rounds. Last values: {last}."
    drawing = curves(series, f"{quantity}{unit_of(quantity)}", marks(run))
    return Figure(drawing, label, f"{quantity[:1].upper()}{quantity[1:]}", Table(head, rows, caption))


def marks(run: RunFiles) -> list[Mark]:
    """Return a line after the last round of each phase, where the phase changes, and one at a divergence."""
    found = []
    for at, (line, after) in enumerate(zip(run.lines, run.lines[1:], strict=False)):
        if line.get("phase") != after.get("phase"):
            frozen = after.get("phase") == "frozen"
            name = f"T* = {line['round']}" if frozen else f"{after.get('phase')} from {after['round']}"
            found.append(Mark(name, {unit: places[at] for unit, places in run.over.items()}))
    since = next((at for at, line in enumerate(run.lines) if "diverged" in line), None)
    if since is not None:
        found.append(Mark("diverged", {unit: places[since] for unit, places in run.over.items()}))
    return found


def domains_section(run: RunFiles) -> Section | None:
    """Return the bars by domain of the result; None where there are no domains."""
    last: Line = next((line for line in reversed(run.lines) if line.get("domains")), {})
    domains: Mapping[str, Mapping[str, float | None]] = run.final.get("domains") or last.get("domains") or {}
    if not domains:
        return None
    main = [key for key in domains if key == run.headline] or list(domains)
    quantity = main[0].rpartition("-")[2]
    shown = {key: values for key, values in domains.items() if key.rpartition("-")[2] == quantity}
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
    keys = list(
        dict.fromkeys(key for metrics in tests.values() for key in metrics if not key.endswith("-num-examples"))
    )
    score = score if score in keys else next((key for key in keys if not key.endswith("-loss")), keys[0])
    quantity = score.rpartition("-")[2]
    alike = [score, *(key for key in keys if key != score and key.endswith(f"-{quantity}"))]
    named = _client_names(run)
    labels = {name: named.get(name, f"client {name}") for name in numbers}
    groups = {key: {labels[n]: scaled(key, tests[n].get(key)) for n in numbers} for key in alike}
    counts = [key for key in ("own-num-examples", "validation-num-examples") if any(key in m for m in tests.values())]
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


def split_section(run: RunFiles) -> Section:
    """Return the class-by-client picture, from ``split.json``, or from the data in a folder of an older version."""
    try:
        saved = run.json("split.json")
        clients, tables = read_split(saved) if saved else ([], count_split(run.config))
    except (FedBNError, OSError) as error:
        text = f"The folder has no split.json, and the data cannot be read here: {error}"
        return Section("split", "Data of the clients", [Text(text, "note")])
    blocks: list[Block] = []
    for table in tables:
        names = [*(clients or map(str, range(len(table.counts))))]
        what, title = table.what, f"{table.of.capitalize()} examples by {table.what} and client"
        numbers = Table(
            ["client", *map(str, table.names), "all"],
            [[name, *map(str, row), str(sum(row))] for name, row in zip(names, table.counts.tolist(), strict=True)],
        )
        drawing = heatmap(
            table.counts.T.tolist(), names, [str(name) for name in table.names], titles=("client", what, "examples")
        )
        label = f"{title}: {_missing(table.counts.tolist(), names)}"
        blocks.append(Figure(drawing, label, title, numbers))
    return Section("split", "Data of the clients", blocks)


def _missing(counts: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    sizes = [sum(row) for row in counts]
    held = [sum(number > 0 for number in row) for row in counts]
    return (
        f"{len(names)} clients have {min(sizes)} to {max(sizes)} examples each, of {min(held)} to {max(held)} of "
        f"{len(counts[0])} kinds."
    )


def _sentence(groups: Mapping[str, Mapping[str, float | None]]) -> str:
    return "; ".join(_pairs(values) for values in groups.values())


def _pairs(values: Mapping[str, float | None]) -> str:
    def all_pairs() -> Iterator[str]:
        for name, value in values.items():
            yield f"{name} {'-' if value is None else format(value, '.2f')}"

    return ", ".join(all_pairs())

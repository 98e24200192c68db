"""The BatchNorm pictures of a run: how far the clients' statistics are from the global ones, and how these change."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.output.folder import STATISTICS_FILE
from fedbn_flwr.lab.report.figures import ROUNDS, UNITS, Drawing, Mark, Series, curves, heatmap
from fedbn_flwr.lab.report.files import RunFiles
from fedbn_flwr.lab.report.page import Block, Figure, Heading, Listing, Section, Table, Text
from fedbn_flwr.lab.report.run_figures import by_round, marks
from fedbn_flwr.lab.report.shown import thinned

__all__ = ["batchnorm_section", "curves_by_round", "l1_means", "shown"]

_DIAGNOSES = ("doctor.json", "doctor/doctor.json")

Line = Mapping[str, Any]
Layer = Mapping[str, Any]
Numbers = Sequence[float | None]


def batchnorm_section(run: RunFiles) -> Section:
    """Return the pictures of ``statistics.jsonl``; without the file a line that says why."""
    lines = read_metrics(run.folder / STATISTICS_FILE)
    pictures = (
        list(_pictures(run, lines)) if lines else [Text("The server saw no statistics of single clients.", "note")]
    )
    return Section("batchnorm", "BatchNorm", [*_findings(run), *pictures])


def _findings(run: RunFiles) -> Iterator[Block]:
    """Yield what the doctor has said, if its ``doctor.json`` lies in the run's folder or in ``doctor/`` there."""
    written = [(path.stat().st_mtime_ns, name) for name in _DIAGNOSES if (path := run.folder / name).is_file()]
    if not written:
        return
    time, newest = max(written)
    diagnosis = run.json(newest)
    findings = diagnosis.get("findings", [])
    yield Text(f"The doctor has {len(findings) or 'no'} {'finding' if len(findings) == 1 else 'findings'}.")
    for finding in findings:
        yield Heading(finding["what"])
        yield Listing(finding["evidence"])
        tries = [[r["setting"], r["why"], r.get("expected", "")] for r in finding["remedies"]]
        yield Table(["what to try, in order", "what it does", "gain where measured, cost"], tries)
    for title, key in (("What the doctor could not measure", "not-measured"), ("Notes of the doctor", "notes")):
        if diagnosis.get(key):
            yield Heading(title)
            yield Listing(diagnosis[key])
    if run.lines and time < (run.folder / "metrics.jsonl").stat().st_mtime_ns:
        yield Text(f"{newest} is older than the last round of the run: it may be about an earlier model.", "warning")


def _pictures(run: RunFiles, lines: Sequence[Line]) -> Iterator[Block]:
    yield Text(
        "Batch statistics of each client, taken from the running statistics that it sent back, beside the global ones "
        "that it got. Far apart, BatchNorm normalises with other numbers in training than in tests."
    )
    local = _l1_of_clients(lines)
    yield _norms(run, lines, local)
    if any(value is None for row in local for value in row):
        text = (
            "Rounds without values: a layer of the clients tracked no statistics, as after T* of FixBN, or a number is "
            "not finite. Layers that never have a value are in no sum."
        )
        yield Text(text, "note")
    layers = list(dict.fromkeys(path for line in lines for path in line["layers"]))
    names = [path or "the model" for path in layers]
    rounds = thinned(lines)
    across = [str(line["round"]) for line in rounds]
    for key, unit in (("mean", "standard deviations"), ("variance", "log of the factor")):
        values = [[_middle(line, _of_clients(line["layers"].get(path), key)) for line in rounds] for path in layers]
        title = f"Distance of the clients' {key}s from the global ones, by layer ({unit})"
        yield _by_layer(values, names, across, title, ("round", "layer", key))
    values = [[_change(line["layers"].get(path), "mean") for line in rounds] for path in layers]
    title = "Change of the global means in a round, by layer (standard deviations)"
    yield _by_layer(values, names, across, title, ("round", "layer", "change"))
    tracked = [line for line in lines if any(map(_is_tracked, line["layers"].values()))]
    if tracked and tracked[-1]["clients"]:
        last = tracked[-1]
        values = [_of_clients(last["layers"].get(path), "mean") for path in layers]
        title = f"Distance of the means by layer and client, round {last['round']} (standard deviations)"
        yield _by_layer(values, names, last["clients"], title, ("client", "layer", "distance"))


def _norms(run: RunFiles, lines: Sequence[Line], local: Sequence[Sequence[float | None]]) -> Figure:
    """Return FixBN's Fig. 3 (a): L1 distances, summed over the layers."""
    low, high = _bounds(local)
    middle, change = l1_means(lines)
    rounds = [line["round"] for line in lines]
    over = dict.fromkeys(UNITS, rounds)
    series = [
        Series("clients, from the global ones", over, middle, 0),
        Series("global, change in the round", over, [value or None for value in change], 1),  # 0 has no logarithm
    ]
    if any(len(row) - row.count(None) > 1 for row in local):
        series[0] = replace(series[0], low=low, high=high)
    title = "L1 distances of the statistics, summed over the layers (FixBN, Fig. 3 a)"
    label = (
        f"{title}: in the last line {shown(middle[-1])} for the clients and {shown(change[-1])} for the global change."
    )
    values = {"clients, mean": middle, "lowest": low, "highest": high, "global, change": change}
    numbers = by_round({name: (rounds, column) for name, column in values.items()}, shown)
    return Figure(curves_by_round(series, "L1 norm", marks(run), log=True), label, title, numbers)


def l1_means(lines: Sequence[Line]) -> tuple[list[float | None], list[float | None]]:
    """Return FixBN's Fig. 3 (a) for each line, L1 norms summed over the layers.

    These are the mean over the clients of the distance from the global statistics, with many clients the median, and
    the change of the global ones. None is a line in which a layer has no value.
    """
    middle = [_middle(line, row) for line, row in zip(lines, _l1_of_clients(lines), strict=True)]
    return middle, [_sum(_change(layer, "l1") for layer in line["layers"].values()) for line in lines]


def curves_by_round(series: Sequence[Series], title: str, marks: Sequence[Mark] = (), *, log: bool = False) -> Drawing:
    """Return curves that are drawn over rounds, whatever the ``Switch`` says: exchanges are not recorded."""
    drawing = curves(series, title, marks, log=log)
    drawing["units"] = dict.fromkeys(UNITS, drawing["units"][ROUNDS])
    return drawing


def _by_layer(
    values: Sequence[Sequence[float | None]],
    layers: Sequence[str],
    across: Sequence[str],
    title: str,
    titles: tuple[str, str, str],
) -> Figure:
    """Return a heat map with a row for each layer; ``titles`` are those of ``heatmap``."""
    known = [(value, name) for name, row in zip(layers, values, strict=True) for value in row if value is not None]
    largest, where = max(known, default=(None, ""))
    label = f"{title}: the largest is {shown(largest)}, in {where}." if known else f"{title}: no values."
    rows = [[name, *map(shown, row)] for name, row in zip(layers, values, strict=True)]
    drawing = heatmap(values, across, layers, titles=titles, text=".2f")
    return Figure(drawing, label, title, Table(["layer", *across], rows))


def _of_clients(layer: Layer | None, key: str) -> list[float | None]:
    """Return a distance for each client."""
    if layer is None:
        return []
    return list(layer["clients"][key])


def _is_tracked(layer: Layer) -> bool:
    """Return whether a client tracked the layer."""
    return any(value is not None for value in _of_clients(layer, "l1"))


def _l1_of_clients(lines: Sequence[Line]) -> list[list[float | None]]:
    """Return for each line the L1 distance of each client, summed over the layers that ever tracked."""
    tracking = {path for line in lines for path, layer in line["layers"].items() if _is_tracked(layer)}
    sums = []
    for line in lines:
        layers = [layer for path, layer in line["layers"].items() if path in tracking or not tracking]
        by_layer = [_of_clients(layer, "l1") for layer in layers]
        sums.append([_sum(of_client) for of_client in zip(*by_layer, strict=True)])
    return sums


def _change(layer: Layer | None, key: str) -> float | None:
    return layer["change"][key] if layer else None


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum over the layers; None if one is missing: sums of other layers are other quantities."""
    total = None
    for value in values:
        if value is None:
            return None
        total = value if total is None else total + value
    return total


def _middle(line: Line, values: Sequence[float | None]) -> float | None:
    """Return the mean over the clients."""
    return _mean(values)


def _mean(values: Numbers, mean: Callable[[list[float]], float] = statistics.fmean) -> float | None:
    """Return the mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _bounds(rows: Sequence[Numbers]) -> tuple[list[float | None], list[float | None]]:
    """Return the lowest and the highest known value of each row; None if none is known."""
    low, high = [], []
    for row in rows:
        known = [value for value in row if value is not None]
        low.append(min(known, default=None))
        high.append(max(known, default=None))
    return low, high


def shown(value: float | None) -> str:
    """Return a norm as text."""
    return "-" if value is None else f"{value:.3g}"

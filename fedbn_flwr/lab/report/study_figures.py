"""The figures of a study: results, curves, paired differences, bars by domain, and the split of the data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.report.curve_figures import UNITS, test_of
from fedbn_flwr.lab.report.figures import BYTES, EXCHANGES, ROUNDS, Dots, Series, bars, curves, dots
from fedbn_flwr.lab.report.page import Block, Figure, Listing, Section, Switch, Table, Text
from fedbn_flwr.lab.report.run_files import RunFiles
from fedbn_flwr.lab.report.shown import form_of, in_percent, scaled, thinned, title_of, unit_of
from fedbn_flwr.lab.report.study_files import StudyFiles
from fedbn_flwr.lab.studies.comparisons import DIFFERENT_TESTS, LEVEL, comparisons, difference, left_out
from fedbn_flwr.lab.studies.domain_table import domain_rows
from fedbn_flwr.lab.studies.numbers import with_std
from fedbn_flwr.training.tasks import quantity_of

__all__ = ["comparison_section", "curves_section", "domains_section", "dots_figures"]

_INTERVAL = f"{LEVEL:.0%} interval over seeds"
_MOST_PAIRS = 30  # of a figure; the table has all

_SURE = {"-": "", "no": "", "yes": "\N{NO-BREAK SPACE}*", "yes, corrected": "\N{NO-BREAK SPACE}**"}

Rows = Sequence[Mapping[str, Any]]


def dots_figures(files: StudyFiles) -> list[Figure]:
    """Return for each split and quantity the runs, their mean with an interval, and the paper's number."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in files.table:
        if row["mean"] is not None:
            groups.setdefault((row["split"], quantity_of(row["metric"])), []).append(row)
    return [_dots(files, split, quantity, rows) for (split, quantity), rows in groups.items()]


def _dots(files: StudyFiles, split: str, quantity: str, rows: Rows) -> Figure:
    mixed, form = len({row["metric"] for row in rows}) > 1, form_of(quantity)
    found, texts = [], []
    for row in rows:
        own = [r for r in files.rows if all(r[k] == row[k] for k in ("method", "split", "metric"))]
        own = [r for r in own if r["status"] == "finished" and r["final"] is not None]
        values, interval = [r["final"] for r in own], difference([r["final"] for r in own])
        name = row["method"] + (f" ({test_of(row['metric'])})" if mixed else "")
        seeds = [f"seed {r['seed']}" for r in own]
        found.append(
            Dots(name, values, row["mean"], interval["low"], interval["high"], row["paper"], row["paper-std"], seeds)
        )
        texts.append(f"{name} {row['mean']:{form}}")
    title = f"{title_of(quantity)}, final result{_of(files, split)}"
    label = f"{title}, mean over seeds: {'; '.join(texts)}."
    head = ["method", "runs", "mean", "from", "to", "the paper"]
    numbers = [
        [
            *(one.name, ", ".join(f"{v:{form}}" for v in one.values)),
            *(with_std(value, None, form) for value in (one.mean, one.low, one.high)),
            with_std(one.paper, one.paper_std, form),
        ]
        for one in found
    ]
    caption = f"{_INTERVAL.capitalize()} (Student's t)"
    drawing = dots(found, f"{quantity}{unit_of(quantity)}", _INTERVAL, form)
    return Figure(drawing, label, title, Table(head, numbers, caption))


def curves_section(files: StudyFiles) -> Section:
    """Return the curves of all methods: the mean over seeds, in a band from the lowest to the highest."""
    figures = []
    for split in files.study.splits:
        runs = {method: files.of(method, split) for method in files.study.methods}
        by_quantity: dict[str, dict[str, list[RunFiles]]] = {}
        for method, own in runs.items():
            if _shared_rounds(own):
                by_quantity.setdefault(quantity_of(own[0].headline), {})[method] = own
        figures += [_curves(files, split, quantity, found) for quantity, found in by_quantity.items()]
    if not figures:
        return Section("curves", "Curves", [Text("No run has a test yet.")])
    text = (
        "Mean over the finished seeds that did not diverge; the band runs from the lowest to the highest seed. A curve "
        "ends with its shortest seed. A method without such a seed has the curve of its longest run. Exchanges and "
        "bytes are those of training, the mean over the seeds; bytes are those of floats."
    )
    return Section("curves", "Curves", [Switch(UNITS), *figures, Text(text, "note")])


def _curves(files: StudyFiles, split: str, quantity: str, runs: Mapping[str, Sequence[RunFiles]]) -> Figure:
    mixed, form = len({own[0].headline for own in runs.values()}) > 1, form_of(quantity)
    series, rounds = [], {}
    for method, own in runs.items():
        name = method + (f" ({test_of(own[0].headline)})" if mixed else "")
        one, found = _mean_curve(name, own, list(files.study.methods).index(method))
        series.append(one)
        rounds[name] = found
    title = f"{title_of(quantity)}{_of(files, split)}"
    everything = thinned(sorted({server_round for found in rounds.values() for server_round in found}))
    rows = [[str(r), *(with_std(found.get(r), None, form) for found in rounds.values())] for r in everything]
    last = "; ".join(f"{name} {with_std(list(found.values())[-1], None, form)}" for name, found in rounds.items())
    label = f"{title} of {len(runs)} methods over rounds. Last values: {last}."
    drawing = curves(series, f"{quantity}{unit_of(quantity)}")
    drawing["height"] = 420
    return Figure(drawing, label, title, Table(["round", *rounds], rows, f"{quantity}{unit_of(quantity)}, mean"))


def _mean_curve(name: str, runs: Sequence[RunFiles], style: int) -> tuple[Series, dict[int, float | None]]:
    """Return the mean of the runs' main metric in each round that all have, and the same by round.

    Over exchanges and bytes a point stands at the mean of the runs' traffic up to its round.
    """
    rounds = _shared_rounds(runs)
    values = [{line["round"]: scaled(run.headline, line[run.headline]) for line in run.measured} for run in runs]
    columns = [[value for found in values if (value := found[r]) is not None] for r in rounds]
    means = [statistics.fmean(column) for column in columns]
    over: dict[str, Sequence[float]] = {ROUNDS: rounds}
    for unit in (EXCHANGES, BYTES):
        places = [dict(zip(run.over[ROUNDS], run.over[unit], strict=True)) for run in runs]
        over[unit] = [round(statistics.fmean(place[r] for place in places), 6) for r in rounds]
    band = len(runs) > 1
    low, high = ([bound(column) for column in columns] if band else () for bound in (min, max))
    return Series(name, over, means, style, low, high), dict(zip(rounds, means, strict=True))


def _shared_rounds(runs: Sequence[RunFiles]) -> list[int]:
    """Return the rounds in which every run has its main metric; none if a run has no test."""
    tested = [dict.fromkeys(line["round"] for line in run.measured) for run in runs]
    return [server_round for server_round in tested[0] if all(server_round in t for t in tested)] if tested else []


def comparison_section(files: StudyFiles) -> Section | None:
    """Return the paired differences between methods, with their intervals; None without two seeds of a pair."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in comparisons(files.rows):
        groups.setdefault((row["split"], quantity_of(row["metric"])), []).append(row)
    groups = {key: rows for key, rows in groups.items() if any(row["seeds"] > 1 for row in rows)}
    blocks: list[Block] = [_differences(files, *key, rows) for key, rows in groups.items()]
    if not blocks:
        return None
    text = (
        f"Final results of two methods with the same seed, which share split and initial weights. Mean difference with "
        f"its {LEVEL:.0%} interval (Student's t). * An interval that leaves out 0: these seeds show a difference. "
        "** They show it also after Holm's correction for all pairs of the split."
    )
    if any(row["low"] is None for rows in groups.values() for row in rows):
        text += " - No interval: one seed, or the same difference in every seed."
    if any(row["metric"] != row["other-metric"] for rows in groups.values() for row in rows):
        text += f" {DIFFERENT_TESTS}"
    if without := left_out(files.rows, [(cell.split, cell.method) for cell in files.cells]):
        blocks += [Text("Left out:"), Listing(without)]
    return Section("comparisons", "Differences between methods", [Text(text), *blocks])


def _differences(files: StudyFiles, split: str, quantity: str, rows: Rows) -> Figure:
    ordered = sorted(rows, key=lambda row: -abs(row["difference"]))
    metrics = {row[key] for row in rows for key in ("metric", "other-metric")}
    name = metrics.pop() if len(metrics) == 1 else quantity

    def names(row: Mapping[str, Any]) -> tuple[str, str]:
        sides = (("method", "metric"), ("other", "other-metric"))
        one, other = (row[who] + (f" ({test_of(row[what])})" if name == quantity else "") for who, what in sides)
        return one, other

    pairs = [
        Dots(f"{' − '.join(names(r))}{_SURE[_shown(r)]}", (), r["difference"], r["low"], r["high"])  # noqa: RUF001
        for r in ordered[:_MOST_PAIRS]
    ]
    title = f"Differences in {name}{_of(files, split)}"
    if len(ordered) > len(pairs):
        title += f", the {len(pairs)} largest of {len(ordered)}"
    head = ["method", "against", "difference", "from", "to", "p", "p (Holm)", "seeds", "shown"]
    table = [
        [
            *(*names(r), *(with_std(r[key], None, f"+{form_of(name)}") for key in ("difference", "low", "high"))),
            *(*(with_std(r[key], None, ".3f") for key in ("p", "p-holm")), str(r["seeds"]), _shown(r)),
        ]
        for r in ordered
    ]
    clear = sum(bool(_SURE[_shown(row)]) for row in rows)
    label = f"{title}: {clear} of {len(rows)} pairs have an interval without 0."
    drawing = dots(
        pairs, f"difference{' (points)' if in_percent(name) else ''}", f"{LEVEL:.0%} interval", form_of(name)
    )
    line = {"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "--muted"}}
    drawing["layout"] |= {"shapes": [line], "showlegend": False}
    return Figure(drawing, label, title, Table(head, table))


def _shown(row: Mapping[str, Any]) -> str:
    """Return whether these seeds show a difference; without an interval "-", see ``difference``."""
    if row["low"] is None:
        return "-"
    if row["low"] <= 0 <= row["high"]:
        return "no"
    return "yes, corrected" if row["p-holm"] < 1 - LEVEL else "yes"


def domains_section(files: StudyFiles) -> Section | None:
    """Return the results by domain: bars for each method, and the paper's numbers in the table."""
    summaries: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell, run in files.runs:
        if run.summary and DIVERGED_AT not in run.summary:
            summaries.setdefault((cell.method, cell.split), []).append(run.summary)
    rows = domain_rows(files.study, summaries)
    blocks: list[Block] = []
    for split, name in dict.fromkeys((row["split"], row["metric"]) for row in rows):
        own = [row for row in rows if (row["split"], row["metric"]) == (split, name)]
        blocks += _domains(files, split, name, own)
    return Section("domains", "Domains", blocks) if blocks else None


def _domains(files: StudyFiles, split: str, name: str, rows: Rows) -> tuple[Figure, Table]:
    domains, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("domain", "method"))
    by_pair = {(row["method"], row["domain"]): row for row in rows}
    groups = {
        domain: {method: by_pair[method, domain]["mean"] for method in methods if (method, domain) in by_pair}
        for domain in domains
    }
    places = 2 if in_percent(name) else 4
    table = []
    for method in methods:
        own = [by_pair.get((method, domain)) for domain in domains]
        table.append([method, *("-" if r is None else with_std(r["mean"], r["std"], f".{places}f") for r in own)])
        if any(r and r["paper"] is not None for r in own):
            stated = ["-" if r is None else with_std(r["paper"], r["paper-std"], f".{places}f") for r in own]
            table.append([f"{method}, the paper", *stated])
            differences = [None if r is None else r["difference"] for r in own]
            table.append([f"{method}, difference", *(with_std(d, None, f"+.{places}f") for d in differences)])
    title = f"{title_of(name)} by domain{_of(files, split)}"
    label = f"{title}, for {len(methods)} methods and {len(domains)} domains; the table below has the numbers."
    drawing = bars(groups, f"{name}{unit_of(name)}", ".1f" if in_percent(name) else ".3f")
    return Figure(drawing, label, title), Table(["method", *domains], table, f"{name}{unit_of(name)}, mean ± deviation")


def _of(files: StudyFiles, split: str) -> str:
    return f", {split}" if len(files.study.splits) > 1 else ""

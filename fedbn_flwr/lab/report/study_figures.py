"""The figures of a study: results, curves, paired differences, bars by domain, and the split of the data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.report.figures import BYTES, EXCHANGES, ROUNDS, Dots, Series, bars_of, curves, dots
from fedbn_flwr.lab.report.files import RunFiles, StudyFiles
from fedbn_flwr.lab.report.page import Block, Figure, Listing, Section, Table, Text
from fedbn_flwr.lab.report.run_figures import SWITCH, by_round, test_of
from fedbn_flwr.lab.report.shown import form_of, in_percent, title_of, with_unit_of
from fedbn_flwr.lab.studies.comparisons import DIFFERENT_TESTS, LEVEL, comparisons, difference, left_out
from fedbn_flwr.lab.studies.domain_table import FIELDS, domain_rows
from fedbn_flwr.lab.studies.rows import grouped, scale_of, with_std
from fedbn_flwr.training.tasks import quantity_of

__all__ = ["comparison_section", "curves_section", "domains_section", "dots_figures"]

_INTERVAL = f"{LEVEL:.0%} interval over seeds"
_MOST_PAIRS = 30  # of a figure; the table has all

_SURE = {"-": "", "no": "", "yes": "\N{NO-BREAK SPACE}*", "yes, corrected": "\N{NO-BREAK SPACE}**"}

Row = Mapping[str, Any]
Rows = Sequence[Row]


def dots_figures(files: StudyFiles) -> list[Figure]:
    """Return for each split and quantity the runs, their mean with an interval, and the paper's number."""
    finished = [row for row in files.table if row["mean"] is not None]
    groups = grouped(finished, lambda row: (row["split"], quantity_of(row["metric"])))
    return [_dots(files, split, quantity, rows) for (split, quantity), rows in groups.items()]


def _dots(files: StudyFiles, split: str, quantity: str, rows: Rows) -> Figure:
    mixed, form = len({row["metric"] for row in rows}) > 1, form_of(quantity)
    finished = [run for run in files.rows if run["status"] == "finished" and run["final"] is not None]
    by_row = grouped(finished, _place)
    methods, lines, means = [], [], []
    for row in rows:
        runs = by_row[_place(row)]
        values, seeds = [run["final"] for run in runs], [f"seed {run['seed']}" for run in runs]
        low, high = (difference(values)[bound] for bound in ("low", "high"))
        name = row["method"] + (f" ({test_of(row['metric'])})" if mixed else "")
        methods.append(Dots(name, values, row["mean"], low, high, row["paper"], row["paper-std"], seeds))
        interval = [with_std(number, None, form) for number in (row["mean"], low, high)]
        paper = with_std(row["paper"], row["paper-std"], form)
        lines.append([name, ", ".join(f"{value:{form}}" for value in values), *interval, paper])
        means.append(f"{name} {row['mean']:{form}}")
    title = f"{title_of(quantity)}, final result{_of(files, split)}"
    label = f"{title}, mean over seeds: {'; '.join(means)}."
    head = ["method", "runs", "mean", "from", "to", "the paper"]
    numbers = Table(head, lines, f"{_INTERVAL.capitalize()} (Student's t)")
    return Figure(dots(methods, with_unit_of(quantity), _INTERVAL, form), label, title, numbers)


def _place(row: Row) -> tuple[str, str, str]:
    return row["method"], row["split"], row["metric"]


def curves_section(files: StudyFiles) -> Section:
    """Return the curves of all methods: the mean over seeds, in a band from the lowest to the highest."""
    figures = []
    for split in files.study.splits:
        runs = [(method, files.of(method, split)) for method in files.study.methods]
        tested = [(method, seeds) for method, seeds in runs if _shared_rounds(seeds)]
        for quantity, methods in grouped(tested, lambda pair: quantity_of(pair[1][0].headline)).items():
            figures.append(_curves(files, split, quantity, dict(methods)))
    if not figures:
        return Section("curves", "Curves", [Text("No run has a test yet.")])
    text = (
        "Mean over the finished seeds that did not diverge; the band runs from the lowest to the highest seed. A curve "
        "ends with its shortest seed. A method without such a seed has the curve of its longest run. Exchanges and "
        "bytes are those of training, the mean over the seeds; bytes are those of floats."
    )
    return Section("curves", "Curves", [SWITCH, *figures, Text(text, "note")])


def _curves(files: StudyFiles, split: str, quantity: str, runs: Mapping[str, Sequence[RunFiles]]) -> Figure:
    mixed, form = len({seeds[0].headline for seeds in runs.values()}) > 1, form_of(quantity)
    series = []
    for method, seeds in runs.items():
        name = method + (f" ({test_of(seeds[0].headline)})" if mixed else "")
        series.append(_mean_curve(name, seeds, list(files.study.methods).index(method)))
    title = f"{title_of(quantity)}{_of(files, split)}"
    last = "; ".join(f"{curve.name} {with_std(curve.values[-1], None, form)}" for curve in series)
    label = f"{title} of {len(runs)} methods over rounds. Last values: {last}."
    drawing = curves(series, with_unit_of(quantity))
    drawing["height"] = 420
    columns = {curve.name: (curve.over[ROUNDS], curve.values) for curve in series}
    numbers = by_round(columns, lambda value: with_std(value, None, form), f"{with_unit_of(quantity)}, mean")
    return Figure(drawing, label, title, numbers)


def _mean_curve(name: str, runs: Sequence[RunFiles], style: int) -> Series:
    """Return the mean of the runs' main metric in each round that all have.

    Over exchanges and bytes a point stands at the mean of the runs' traffic up to its round.
    """
    rounds = _shared_rounds(runs)
    by_run = []
    for run in runs:
        measured = {line["round"]: line[run.headline] for line in run.measured}
        by_run.append([measured[server_round] * scale_of(run.headline) for server_round in rounds])
    values = list(zip(*by_run, strict=True))  # of each round
    over: dict[str, Sequence[float]] = {ROUNDS: rounds}
    for unit in (EXCHANGES, BYTES):
        places = [dict(zip(run.over[ROUNDS], run.over[unit], strict=True)) for run in runs]
        means = [statistics.fmean(place[server_round] for place in places) for server_round in rounds]
        over[unit] = [round(mean, 6) for mean in means]
    curve = Series(name, over, list(map(statistics.fmean, values)), style)
    return curve if len(runs) == 1 else replace(curve, low=list(map(min, values)), high=list(map(max, values)))


def _shared_rounds(runs: Sequence[RunFiles]) -> list[int]:
    """Return the rounds in which every run has its main metric; none if a run has no test."""
    tested = [dict.fromkeys(line["round"] for line in run.measured) for run in runs]
    return [server_round for server_round in tested[0] if all(server_round in t for t in tested)] if tested else []


def comparison_section(files: StudyFiles) -> Section | None:
    """Return the paired differences between methods, with their intervals; None without two seeds of a pair."""
    blocks: list[Block] = []
    shown: list[Row] = []
    groups = grouped(comparisons(files.rows), lambda row: (row["split"], quantity_of(row["metric"])))
    for (split, quantity), rows in groups.items():
        if any(row["seeds"] > 1 for row in rows):
            blocks.append(_differences(files, split, quantity, rows))
            shown += rows
    if not blocks:
        return None
    text = (
        f"Final results of two methods with the same seed, which share split and initial weights. Mean difference with "
        f"its {LEVEL:.0%} interval (Student's t). * An interval that leaves out 0: these seeds show a difference. "
        "** They show it also after Holm's correction for all pairs of the split."
    )
    if any(row["low"] is None for row in shown):
        text += " - No interval: one seed, or the same difference in every seed."
    if any(row["metric"] != row["other-metric"] for row in shown):
        text += f" {DIFFERENT_TESTS}"
    if without := left_out(files.rows, [(cell.split, cell.method) for cell in files.cells]):
        blocks += [Text("Left out:"), Listing(without)]
    return Section("comparisons", "Differences between methods", [Text(text), *blocks])


def _differences(files: StudyFiles, split: str, quantity: str, rows: Rows) -> Figure:
    metrics = {row[key] for row in rows for key in ("metric", "other-metric")}
    name = metrics.pop() if len(metrics) == 1 else quantity
    form = form_of(name)
    pairs, lines = [], []
    for row in sorted(rows, key=lambda row: -abs(row["difference"])):
        one, other, shown = row["method"], row["other"], _shown(row)
        if name == quantity:
            one, other = f"{one} ({test_of(row['metric'])})", f"{other} ({test_of(row['other-metric'])})"
        label = f"{one} \N{MINUS SIGN} {other}{_SURE[shown]}"
        pairs.append(Dots(label, (), row["difference"], row["low"], row["high"]))
        numbers = [with_std(row[key], None, f"+{form}") for key in ("difference", "low", "high")]
        tests = [with_std(row[key], None, ".3f") for key in ("p", "p-holm")]
        lines.append([one, other, *numbers, *tests, str(row["seeds"]), shown])
    title = f"Differences in {name}{_of(files, split)}"
    if len(pairs) > _MOST_PAIRS:
        title += f", the {_MOST_PAIRS} largest of {len(pairs)}"
    clear = sum(bool(_SURE[_shown(row)]) for row in rows)
    label = f"{title}: {clear} of {len(rows)} pairs have an interval without 0."
    axis = "difference (points)" if in_percent(name) else "difference"
    drawing = dots(pairs[:_MOST_PAIRS], axis, f"{LEVEL:.0%} interval", form)
    zero = {"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "--muted"}}
    drawing["layout"] |= {"shapes": [zero], "showlegend": False}
    head = ["method", "against", "difference", "from", "to", "p", "p (Holm)", "seeds", "shown"]
    return Figure(drawing, label, title, Table(head, lines))


def _shown(row: Row) -> str:
    """Return whether these seeds show a difference; without an interval "-", see ``difference``."""
    if row["low"] is None:
        return "-"
    if row["low"] <= 0 <= row["high"]:
        return "no"
    return "yes, corrected" if row["p-holm"] < 1 - LEVEL else "yes"


def domains_section(files: StudyFiles) -> Section | None:
    """Return the results by domain: bars for each method, and the paper's numbers in the table."""
    summaries: dict[tuple[str, str], list[Row]] = {}
    for cell, run in files.runs:
        if run.summary and DIVERGED_AT not in run.summary:
            summaries.setdefault((cell.method, cell.split), []).append(run.summary)
    rows = domain_rows(files.study, summaries)
    blocks: list[Block] = []
    for (split, name), group in grouped(rows, lambda row: (row["split"], row["metric"])).items():
        blocks += _domains(files, split, name, group)
    return Section("domains", "Domains", blocks) if blocks else None


def _domains(files: StudyFiles, split: str, name: str, rows: Rows) -> tuple[Figure, Table]:
    methods, form = grouped(rows, lambda row: row["method"]), form_of(name)
    groups: dict[str, dict[str, float | None]] = {row["domain"]: {} for row in rows}
    for row in rows:
        groups[row["domain"]][row["method"]] = row["mean"]
    lines = []
    for method, of_method in methods.items():
        by_domain = {row["domain"]: row for row in of_method}
        cells = [by_domain.get(domain, dict.fromkeys(FIELDS)) for domain in groups]
        lines.append([method, *(with_std(row["mean"], row["std"], form) for row in cells)])
        if any(row["paper"] is not None for row in of_method):
            papers = [with_std(row["paper"], row["paper-std"], form) for row in cells]
            differences = [with_std(row["difference"], None, f"+{form}") for row in cells]
            lines += [[f"{method}, the paper", *papers], [f"{method}, difference", *differences]]
    title = f"{title_of(name)} by domain{_of(files, split)}"
    label = f"{title}, for {len(methods)} methods and {len(groups)} domains; the table below has the numbers."
    numbers = Table(["method", *groups], lines, f"{with_unit_of(name)}, mean ± deviation")
    return Figure(bars_of(groups, name), label, title), numbers


def _of(files: StudyFiles, split: str) -> str:
    return f", {split}" if len(files.study.splits) > 1 else ""

"""The files of a study's results: tidy rows, means over seeds beside the paper's numbers, comparisons, curves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.lab.files import csv_text
from fedbn_flwr.lab.output.curves import draw_curves
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.output.global_tests import headlines
from fedbn_flwr.lab.studies.comparisons import FIELDS as COMPARED
from fedbn_flwr.lab.studies.comparisons import comparisons, comparisons_page, left_out
from fedbn_flwr.lab.studies.domain_table import FIELDS as BY_DOMAIN
from fedbn_flwr.lab.studies.domain_table import domain_page, domain_rows
from fedbn_flwr.lab.studies.results import FIELDS, StudyResults
from fedbn_flwr.lab.studies.rows import Grid, Page, Pages, grouped, mean_std, with_std
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.training.tasks import in_percent

__all__ = ["shown_runs", "table_rows", "write_tables"]

Row = Mapping[str, Any]
_TARGETS = ("rounds-to-target", "exchanges-to-target", "bytes-to-target")
_COSTS = (("rounds", ".10g"), ("exchanges", ".10g"), ("megabytes", ".2f"))  # with their formats


def write_tables(results: StudyResults) -> Pages:
    """Write the files of the results so far; return the tables.

    ``results.jsonl`` and ``results.csv`` have a row for each run and metric, ``table.md`` and ``table.csv`` one for
    each method, split and metric, ``comparisons.md`` and ``comparisons.csv`` the paired differences, ``domains.md`` and
    ``domains.csv`` the tests by domain, if any; ``curves.png`` shows the runs of the first seed that has any.
    """
    study, out = results.study, results.out
    rows = results.rows()
    table = table_rows(study, rows)
    pages = [_page(study, table)]
    write_atomically(out / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_atomically(out / "results.csv", csv_text(FIELDS, rows))
    write_atomically(out / "table.md", str(pages[0]))
    write_atomically(out / "table.csv", csv_text(_COLUMNS, table))
    for name in ("domains", "comparisons"):  # of a study that has changed
        for end in ("md", "csv"):
            (out / f"{name}.{end}").unlink(missing_ok=True)
    if domains := domain_rows(study, _by_pair(results)):
        pages.append(domain_page(study.name, domains))
        write_atomically(out / "domains.md", str(pages[-1]))
        write_atomically(out / "domains.csv", csv_text(BY_DOMAIN, domains))
    if compared := comparisons(rows):
        pairs_of_study = itertools.product(study.splits, study.methods)
        without = left_out(rows, [(s, m) for s, m in pairs_of_study if f"{m}/{s}" not in study.skip])
        pages.append(comparisons_page(study.name, compared, without))
        write_atomically(out / "comparisons.md", str(pages[-1]))
        write_atomically(out / "comparisons.csv", csv_text(COMPARED, compared))
    begun = ((cell, history) for cell in study.cells() if (history := results.history(cell)))  # seed by seed
    _, of_first_seed = next(itertools.groupby(begun, lambda pair: pair[0].seed), (0, ()))
    curves, main = {}, {}
    scores: dict[str, None] = {}
    for cell, history in of_first_seed:
        name = f"{cell.method}, {cell.split}"
        curves[name], main[name] = history, headlines(cell.config)[0]
        scores[cell.config.learning_task().score] = None
    write_atomically(out / "curves.png", draw_curves(curves, study.name, [*scores], main))
    return Pages(pages)


_COLUMNS = (
    "method",
    "split",
    "metric",
    "runs",
    "without-value",
    "with-rejected",
    "diverged",
    "failed",
    "mean",
    "std",
    "best-mean",
    "best-std",
    "rounds",
    "megabytes",
    "exchanges",
    "target",
    "reached",
    *_TARGETS,
    "paper",
    "paper-std",
    "difference",
)


def table_rows(study: Study, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row for each method, split and metric, from the tidy rows.

    Means and sample standard deviations are those of the runs that finished with a value, which ``runs`` counts; rounds
    and traffic are means, too.
    ``with-rejected`` counts the runs of the mean in which replies were lost or refused, and ``reached`` those that
    reached the target, None if rounds of a run are lost; the means up to the target are those of the latter.
    ``difference`` is mean minus paper.
    """
    by_pair = grouped(rows, lambda row: (row["method"], row["split"]))
    table = []
    for split in study.splits:
        for method in study.methods:
            of_pair = by_pair.get((method, split), [])
            failed = [row for row in of_pair if row["status"] == "failed"]
            by_metric = grouped((row for row in of_pair if row["status"] != "failed"), lambda row: row["metric"])
            if failed and not by_metric:
                by_metric = {None: []}
            table += [_row(method, split, metric, ended, len(failed)) for metric, ended in by_metric.items()]
    return table


def _row(method: str, split: str, metric: str | None, ended: Sequence[Row], num_failed: int) -> dict[str, Any]:
    counted = [row for row in ended if row["status"] == "finished"]
    shown = counted or ended
    mean, std = mean_std(row["final"] for row in counted)
    best, best_std = mean_std(row["best"] for row in counted)
    reached = [row for row in counted if row["rounds-to-target"] is not None]
    lost = any(row["best"] is None and row["final"] is not None for row in counted)  # rounds of a run
    one: Row = shown[0] if shown else dict.fromkeys(FIELDS)
    stated = all(row["paper"] is not None for row in shown)  # of domains: in each run
    paper, paper_std = (one["paper"], one["paper-std"]) if stated else (None, None)
    moved = _mean(shown, "bytes")
    return {
        "method": method,
        "split": split,
        "metric": metric,
        "runs": sum(row["final"] is not None for row in counted),
        "without-value": sum(row["final"] is None for row in counted),
        "with-rejected": sum(row["rejected"] > 0 for row in counted),
        "diverged": len(ended) - len(counted),
        "failed": num_failed,
        "mean": mean,
        "std": std,
        "best-mean": best,
        "best-std": best_std,
        "rounds": _mean(shown, "rounds"),
        "megabytes": None if moved is None else moved / 2**20,
        "exchanges": _mean(shown, "exchanges"),
        "target": one["target"],
        "reached": None if one["target"] is None or lost else len(reached),
        **{key: _mean(reached, key) for key in _TARGETS},
        "paper": paper,
        "paper-std": paper_std,
        "difference": None if paper is None or mean is None else mean - paper,
    }


def _mean(rows: Sequence[Row], key: str) -> float | None:
    return mean_std(row[key] for row in rows)[0]


def shown_runs(row: Row) -> str:
    """Return the number of runs of a row of the table, and what must be known of them."""
    others = {
        "without-value": "without a value",
        "with-rejected": "with lost replies",
        "diverged": "diverged",
        "failed": "failed",
    }
    return ", ".join([str(row["runs"]), *(f"{row[key]} {what}" for key, what in others.items() if row[key])])


def _by_pair(results: StudyResults) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the summaries of the finished runs that did not diverge, by method and split."""
    study, cells = results.study, grouped(results.study.cells(), lambda cell: (cell.method, cell.split))
    by_pair = {}
    for split, method in itertools.product(study.splits, study.methods):
        summaries = filter(None, map(results.summary, cells.get((method, split), ())))
        if finished := [summary for summary in summaries if DIVERGED_AT not in summary]:
            by_pair[method, split] = finished
    return by_pair


def _page(study: Study, rows: Sequence[Row]) -> Page:
    shares = [in_percent(row["metric"] or "") for row in rows]
    unit, mixed = ", %" if all(shares) else "", len({*shares}) > 1
    aims = any(row["target"] is not None for row in rows)
    paper = any(row["paper"] is not None for row in rows)
    head = ["method", "split", "metric", f"final{unit}", f"best{unit}", "rounds", "exchanges", "MB of floats", "runs"]
    if aims:
        head += ["target", "rounds to it", "exchanges to it", "MB to it", "reached"]
    if paper:
        head += [f"paper{unit}", "difference"]
    lines = []
    for row, share in zip(rows, shares, strict=True):
        form = ".2f" if share else ".4f"
        metric = row["metric"] or "-"
        if mixed and share:
            metric += ", %"
        cells = [row["method"], row["split"], metric, with_std(row["mean"], row["std"], form)]
        cells += [with_std(row["best-mean"], None, form)]
        cells += [with_std(row[key], None, cost_form) for key, cost_form in _COSTS]
        cells += [shown_runs(row)]
        if aims:
            rounds, exchanges, moved = (row[key] for key in _TARGETS)
            megabytes = None if moved is None else moved / 2**20
            cells += ["" if row["target"] is None else f"{row['target']:g}", with_std(rounds, None, ".1f")]
            cells += [with_std(exchanges, None, ".1f"), with_std(megabytes, None, ".2f")]
            cells += ["" if row["reached"] is None else f"{row['reached']} of {row['runs']}"]
        if paper:
            cells += [with_std(row["paper"], row["paper-std"], form, "")]
            cells += [with_std(row["difference"], None, f"+{form}", "")]
        lines.append(cells)
    return Page(study.name, (Grid.of(head, lines),))

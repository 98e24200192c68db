"""The files of a study's results: tidy rows, means over seeds beside the paper's numbers, comparisons, curves."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.lab.output.curves import draw_curves
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.output.global_tests import headlines
from fedbn_flwr.lab.studies.comparisons import FIELDS as COMPARED
from fedbn_flwr.lab.studies.comparisons import comparisons, comparisons_markdown, left_out
from fedbn_flwr.lab.studies.domain_table import FIELDS as BY_DOMAIN
from fedbn_flwr.lab.studies.domain_table import domain_markdown, domain_rows
from fedbn_flwr.lab.studies.numbers import table_line, with_std
from fedbn_flwr.lab.studies.results import FIELDS, StudyResults
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.training.tasks import in_percent

__all__ = ["shown_runs", "table_rows", "write_tables"]

Row = Mapping[str, Any]
_TARGETS = ("rounds-to-target", "exchanges-to-target", "bytes-to-target")
_COSTS = (("rounds", ".10g"), ("exchanges", ".10g"), ("megabytes", ".2f"))  # with their formats


def write_tables(results: StudyResults) -> str:
    """Write the files of the results so far; return the Markdown of the tables.

    ``results.jsonl`` and ``results.csv`` have a row for each run and metric, ``table.md`` and ``table.csv`` one for
    each method, split and metric, ``comparisons.md`` and ``comparisons.csv`` the paired differences, ``domains.md`` and
    ``domains.csv`` the tests by domain, if any; ``curves.png`` shows the runs of the first seed that has any.
    """
    study, out = results.study, results.out
    rows = results.rows()
    table = table_rows(study, rows)
    text = _markdown(study, table)
    write_atomically(out / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_atomically(out / "results.csv", _csv(FIELDS, rows))
    write_atomically(out / "table.md", text)
    write_atomically(out / "table.csv", _csv(_COLUMNS, table))
    for name in ("domains", "comparisons"):  # of a study that has changed
        for end in ("md", "csv"):
            (out / f"{name}.{end}").unlink(missing_ok=True)
    if domains := domain_rows(study, _by_pair(results)):
        by_domain = domain_markdown(study.name, domains)
        write_atomically(out / "domains.md", by_domain)
        write_atomically(out / "domains.csv", _csv(BY_DOMAIN, domains))
        text += "\n" + by_domain
    if compared := comparisons(rows):
        cells = [(split, method) for split in study.splits for method in study.methods]
        without = left_out(rows, [(s, m) for s, m in cells if f"{m}/{s}" not in study.skip])
        pairs = comparisons_markdown(study.name, compared, without)
        write_atomically(out / "comparisons.md", pairs)
        write_atomically(out / "comparisons.csv", _csv(COMPARED, compared))
        text += "\n" + pairs
    of_seeds = ([cell for cell in study.cells() if cell.seed == seed] for seed in study.seeds)
    begun = ([cell for cell in cells if results.history(cell)] for cells in of_seeds)
    first = {f"{cell.method}, {cell.split}": cell for cell in next(filter(None, begun), [])}
    scores = dict.fromkeys(cell.config.learning_task().score for cell in first.values())
    curves = {name: results.history(cell) for name, cell in first.items()}
    main = {name: headlines(cell.config)[0] for name, cell in first.items()}
    write_atomically(out / "curves.png", draw_curves(curves, study.name, [*scores], main))
    return text


_COLUMNS = (
    *(
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
    ),
    *("megabytes", "exchanges", "target", "reached", *_TARGETS, "paper", "paper-std", "difference"),
)


def table_rows(study: Study, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row for each method, split and metric, from the tidy rows.

    Means and sample standard deviations are those of the runs that finished with a value, which ``runs`` counts; rounds
    and traffic are means, too.
    ``with-rejected`` counts the runs of the mean in which replies were lost or refused, and ``reached`` those that
    reached the target, None if rounds of a run are lost; the means up to the target are those of the latter.
    ``difference`` is mean minus paper.
    """
    groups: dict[tuple[str, str, str | None], list[Row]] = {}
    for split in study.splits:
        for method in study.methods:
            own = [row for row in rows if (row["method"], row["split"]) == (method, split)]
            failed = [row for row in own if row["status"] == "failed"]
            for metric in dict.fromkeys(row["metric"] for row in own if row not in failed) or [None] * bool(failed):
                groups[method, split, metric] = [row for row in own if row["metric"] == metric or row in failed]
    return [_row(*key, own) for key, own in groups.items()]


def _row(method: str, split: str, metric: str | None, own: Sequence[Row]) -> dict[str, Any]:
    counted = [row for row in own if row["status"] == "finished"]
    ended = [row for row in own if row["status"] != "failed"]
    shown = counted or ended
    mean, std = _mean_std([row["final"] for row in counted])
    best, best_std = _mean_std([row["best"] for row in counted])
    reached = [row for row in counted if row["rounds-to-target"] is not None]
    lost = any(row["best"] is None and row["final"] is not None for row in counted)  # rounds of a run
    one: Row = shown[0] if shown else dict.fromkeys(FIELDS)
    stated = all(row["paper"] is not None for row in shown)  # of domains: in each run
    paper, paper_std = (one["paper"], one["paper-std"]) if stated else (None, None)
    rounds, exchanges, moved = (_mean_std([row[key] for row in shown])[0] for key in ("rounds", "exchanges", "bytes"))
    return {
        "method": method,
        "split": split,
        "metric": metric,
        "runs": sum(row["final"] is not None for row in counted),
        "without-value": sum(row["final"] is None for row in counted),
        "with-rejected": sum(row["rejected"] > 0 for row in counted),
        "diverged": len(ended) - len(counted),
        "failed": len(own) - len(ended),
        "mean": mean,
        "std": std,
        "best-mean": best,
        "best-std": best_std,
        "rounds": rounds,
        "megabytes": None if moved is None else moved / 2**20,
        "exchanges": exchanges,
        "target": one["target"],
        "reached": None if one["target"] is None or lost else len(reached),
        **{key: _mean_std([row[key] for row in reached])[0] for key in _TARGETS},
        "paper": paper,
        "paper-std": paper_std,
        "difference": None if paper is None or mean is None else mean - paper,
    }


def shown_runs(row: Row) -> str:
    """Return the number of runs of a row of the table, and what must be known of them."""
    others = (
        *(("without-value", "without a value"), ("with-rejected", "with lost replies")),
        *(("diverged", "diverged"), ("failed", "failed")),
    )
    return ", ".join([str(row["runs"]), *(f"{row[key]} {what}" for key, what in others if row[key])])


def _mean_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None, statistics.stdev(known) if len(known) > 1 else None


def _by_pair(results: StudyResults) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the summaries of the finished runs that did not diverge, by method and split."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in sorted(results.study.cells(), key=lambda cell: list(results.study.methods).index(cell.method)):
        summary = results.summary(cell)
        if summary and DIVERGED_AT not in summary:
            found.setdefault((cell.method, cell.split), []).append(summary)
    return dict(sorted(found.items(), key=lambda item: list(results.study.splits).index(item[0][1])))


def _csv(fields: Sequence[str], rows: Sequence[Row]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=fields)
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _markdown(study: Study, rows: Sequence[Row]) -> str:
    shares = [in_percent(row["metric"] or "") for row in rows]
    unit, mixed = ", %" if all(shares) else "", len({*shares}) > 1
    aims = any(row["target"] is not None for row in rows)
    paper = any(row["paper"] is not None for row in rows)
    heads = ["method", "split", "metric", f"final{unit}", f"best{unit}", "rounds", "exchanges", "MB of floats", "runs"]
    heads += ["target", "rounds to it", "exchanges to it", "MB to it", "reached"] * aims
    heads += [f"paper{unit}", "difference"] * paper
    lines = [f"# {study.name}", "", table_line(heads), "|---" * len(heads) + "|"]
    for row, share in zip(rows, shares, strict=True):
        places = 2 if share else 4
        final = with_std(row["mean"], row["std"], f".{places}f")
        best = with_std(row["best-mean"], None, f".{places}f")
        metric = (row["metric"] or "-") + ", %" * (mixed and share)
        cells = [row["method"], row["split"], metric, final, best]
        cells += [with_std(row[key], None, form) for key, form in _COSTS]
        cells += [shown_runs(row)]
        if aims:
            rounds, exchanges, moved = (row[key] for key in _TARGETS)
            megabytes = None if moved is None else moved / 2**20
            cells += ["" if row["target"] is None else f"{row['target']:g}", with_std(rounds, None, ".1f")]
            cells += [with_std(exchanges, None, ".1f"), with_std(megabytes, None, ".2f")]
            cells += ["" if row["reached"] is None else f"{row['reached']} of {row['runs']}"]
        if paper:
            cells += [with_std(row["paper"], row["paper-std"], f".{places}f", "")]
            cells += [with_std(row["difference"], None, f"+.{places}f", "")]
        lines.append(table_line(cells))
    return "\n".join(lines) + "\n"

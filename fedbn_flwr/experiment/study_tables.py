"""The tables and curves of a study: mean and standard deviation over seeds, beside the paper's numbers."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.experiment.curves import draw_curves
from fedbn_flwr.experiment.domain_table import FIELDS, domain_markdown, domain_rows
from fedbn_flwr.experiment.output import DIVERGED_AT, read_metrics
from fedbn_flwr.experiment.study import Study, finished, summary_of
from fedbn_flwr.training.tasks import in_percent

__all__ = ["write_tables"]


def write_tables(study: Study, out: Path) -> str:
    """Write ``table.md``, ``table.csv``, ``curves.png``, and the tables by domain if any; return the Markdown."""
    ended = {(m, split): _done(study, out, m, split) for split in study.splits for m in study.methods}
    done = {key: [s for s in summaries if DIVERGED_AT not in s] for key, summaries in ended.items()}
    rows = [
        _row(study, *key, metric, done[key] or summaries, len(summaries) - len(done[key]))
        for key, summaries in ended.items()
        for metric in _metrics(study, summaries)
    ]
    shown = [row for row in rows if row["runs"] or row["diverged"]]
    table = _markdown(study, shown)
    write_atomically(out / "table.md", table)
    write_atomically(out / "table.csv", _csv(list(rows[0]), shown))
    if domains := domain_rows(done, study.paper, study.metrics):
        by_domain = domain_markdown(study.name, domains)
        write_atomically(out / "domains.md", by_domain)
        write_atomically(out / "domains.csv", _csv(FIELDS, domains))
        table += "\n" + by_domain
    first = [cell for cell in study.cells() if cell.seed == study.seeds[0]]
    curves = {f"{c.method}, {c.split}": read_metrics(c.folder(out) / "metrics.jsonl") for c in first}
    score = first[0].config.learning_task().score if first else ""
    write_atomically(out / "curves.png", draw_curves({k: v for k, v in curves.items() if v}, study.name, score))
    return table


def _done(study: Study, out: Path, method: str, split: str) -> list[dict[str, Any]]:
    """Return the summaries of the finished runs."""
    folders = [cell.folder(out) for cell in study.cells() if (cell.method, cell.split) == (method, split)]
    return [summary_of(folder) for folder in folders if finished(folder)]


def _csv(fields: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=fields)
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _metrics(study: Study, done: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metrics that runs have rows for."""
    main = done[0]["headline"] if done else ""
    return [name for name in study.metrics if any(name in s["final"] for s in done)] or [main]


def _row(
    study: Study, method: str, split: str, metric: str, done: Sequence[Mapping[str, Any]], num_diverged: int
) -> dict[str, Any]:
    """Return a row of the table, from the runs that did not diverge; their numbers are empty if all did."""
    paper = study.paper.get(f"{method}/{split}") if done and metric == done[0]["headline"] else None
    counted = [s for s in done if DIVERGED_AT not in s]
    scale = 100 if in_percent(metric) else 1
    final = [scale * s["final"][metric] for s in counted if s["final"].get(metric) is not None]
    best = [scale * s["best"][metric] for s in counted if s["best"].get(metric) is not None]
    ledger = done[0]["ledger"] if done else {}
    return {
        "method": method,
        "split": split,
        "metric": metric,
        "runs": len(counted),
        "diverged": num_diverged,
        "mean": statistics.fmean(final) if final else None,
        "std": statistics.stdev(final) if len(final) > 1 else None,
        "best-mean": statistics.fmean(best) if best else None,
        "rounds": done[0]["rounds"] if done else 0,
        "megabytes": (ledger.get("bytes-down", 0) + ledger.get("bytes-up", 0)) / 2**20,
        "exchanges": ledger.get("exchanges", 0),
        "paper": None if isinstance(paper, dict) else paper,
    }


def _markdown(study: Study, rows: list[dict[str, Any]]) -> str:
    unit = ", %" if all(in_percent(row["metric"]) for row in rows) else ""
    lines = [
        f"# {study.name}",
        "",
        f"| method | split | metric | final{unit} | best{unit} | rounds | exchanges | MB of floats | runs "
        f"| paper{unit} |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        places = 2 if in_percent(row["metric"]) else 4
        final = "-" if row["mean"] is None else f"{row['mean']:.{places}f}"
        final += f" ± {row['std']:.{places}f}" if row["std"] is not None else ""
        best = "-" if row["best-mean"] is None else f"{row['best-mean']:.{places}f}"
        paper = "" if row["paper"] is None else f"{row['paper']:.2f}"
        runs = f"{row['runs']}, {row['diverged']} diverged" if row["diverged"] else row["runs"]
        cells = [row["method"], row["split"], row["metric"], final, best, row["rounds"], row["exchanges"]]
        lines.append("| " + " | ".join(map(str, [*cells, f"{row['megabytes']:.2f}", runs, paper])) + " |")
    return "\n".join(lines) + "\n"

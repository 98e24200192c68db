"""A study's metrics by domain, as Table 1 of FedWon (arXiv:2306.11879): the domains and their plain average."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.training.tasks import in_percent

__all__ = ["AVERAGE", "FIELDS", "domain_markdown", "domain_rows"]

AVERAGE = "average"
FIELDS = ("method", "split", "metric", "domain", "runs", "mean", "std", "paper")
Summaries = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def domain_rows(summaries: Summaries, paper: Mapping[str, Any], metrics: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a row for each method, split and domain, and one for the average of the domains; shares in percent.

    Args:
        summaries: the finished runs of each (method, split). A run counts if the metric was measured by domain: with
            the global model on each domain's test set, or with the clients of each domain on their own test sets.
        paper: by METHOD/SPLIT a mapping of domains and "average" to the paper's numbers; other entries are ignored.
        metrics: the metrics with rows; none = the main metric of each run.
    """
    rows: list[dict[str, Any]] = []
    cells = [
        (method, split, metric, done)
        for (method, split), done in summaries.items()
        for metric in metrics or dict.fromkeys(s["headline"] for s in done)
    ]
    for method, split, metric, done in cells:
        found = [s["final"]["domains"][metric] for s in done if metric in s["final"].get("domains", {})]
        if not found:
            continue
        stated = paper.get(f"{method}/{split}") if metric == done[0]["headline"] else None
        stated = stated if isinstance(stated, Mapping) else {}
        defined = [{domain: value for domain, value in run.items() if value is not None} for run in found]
        runs = [{**run, AVERAGE: statistics.fmean(run.values())} for run in defined if run]
        scale = 100 if in_percent(metric) else 1
        for domain in dict.fromkeys([*(name for run in found for name in run), *stated, AVERAGE]):
            values = [scale * run[domain] for run in runs if domain in run]
            numbers = {
                "runs": len(values),
                "mean": statistics.fmean(values) if values else None,
                "std": statistics.stdev(values) if len(values) > 1 else None,
                "paper": stated.get(domain),
            }
            about = {"method": method, "split": split, "metric": metric, "domain": domain}
            rows.append({**about, **numbers})
    return rows


def domain_markdown(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table: domains in columns, mean ± std, the paper's numbers on a separate line."""
    domains = [*dict.fromkeys(row["domain"] for row in rows if row["domain"] != AVERAGE), AVERAGE]
    lines = [
        f"# {name}, by domain",
        "",
        "| " + " | ".join(["method", "split", "metric", *domains, "runs"]) + " |",
        "|---" * (len(domains) + 4) + "|",
    ]
    keys = ("method", "split", "metric")
    for about in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        own = {row["domain"]: row for row in rows if tuple(row[key] for key in keys) == about}
        (method, split, metric), runs = about, own[AVERAGE]["runs"]
        places = 2 if in_percent(metric) else 4
        cells = [_shown(own[name]["mean"], own[name]["std"], places) if name in own else "-" for name in domains]
        lines.append("| " + " | ".join([method, split, metric, *cells, str(runs)]) + " |")
        if any(row["paper"] is not None for row in own.values()):
            stated = [own[domain]["paper"] if domain in own else None for domain in domains]
            cells = ["" if number is None else f"{number:g}" for number in stated]
            lines.append("| " + " | ".join([method, split, "the paper's", *cells, ""]) + " |")
    return "\n".join(lines) + "\n"


def _shown(mean: float | None, std: float | None, places: int) -> str:
    text = "-" if mean is None else f"{mean:.{places}f}"
    return text if std is None else f"{text} ± {std:.{places}f}"

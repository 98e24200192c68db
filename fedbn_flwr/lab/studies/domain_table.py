"""A study's metrics by domain, as Table 1 of FedWon (arXiv:2306.11879): the domains and their plain average."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.lab.studies.numbers import AVERAGE, WHOLE, PaperNumber, table_line, with_std
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.training.tasks import in_percent

__all__ = ["FIELDS", "domain_markdown", "domain_rows", "is_average"]

FIELDS = ("method", "split", "metric", "domain", "runs", "mean", "std", "paper", "paper-std", "difference")
Summaries = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def domain_rows(study: Study, summaries: Summaries) -> list[dict[str, Any]]:
    """Return a row for each method, split and domain, and one for the average of the domains; shares in percent.

    The average is that of the runs with a value in every domain.

    Args:
        study: the study, with the metrics that have rows (by default the main one of each run) and the paper's numbers
            by domain and "average".
        summaries: the finished runs of each (method, split). A run counts if the metric was measured by domain: with
            the global model on each domain's test set, or with the clients of each domain on their own test sets.
    """
    rows: list[dict[str, Any]] = []
    cells = [
        (method, split, metric, done)
        for (method, split), done in summaries.items()
        for metric in study.metrics or dict.fromkeys(s["headline"] for s in done)
    ]
    for method, split, metric, done in cells:
        found = [s["final"]["domains"][metric] for s in done if metric in s["final"].get("domains", {})]
        if not found:
            continue
        stated = study.paper_numbers(f"{method}/{split}") if metric == done[0]["headline"] else {}
        stated.pop(WHOLE, None)
        runs = [{domain: value for domain, value in run.items() if value is not None} for run in found]
        num_domains = len({domain for run in found for domain in run})
        for run in runs:
            if len(run) == num_domains:  # an average over other domains is another quantity
                run[AVERAGE] = statistics.fmean(run.values())
        scale = 100 if in_percent(metric) else 1
        for domain in dict.fromkeys([*(name for run in found for name in run), *stated, AVERAGE]):
            values = [scale * run[domain] for run in runs if domain in run]
            mean, number = statistics.fmean(values) if values else None, stated.get(domain, PaperNumber())
            numbers = {
                "runs": len(values),
                "mean": mean,
                "std": statistics.stdev(values) if len(values) > 1 else None,
                "paper": number.mean,
                "paper-std": number.std,
                "difference": None if mean is None or number.mean is None else mean - number.mean,
            }
            about = {"method": method, "split": split, "metric": metric, "domain": domain}
            rows.append({**about, **numbers})
    return rows


def is_average(final: Mapping[str, Any], metric: str) -> bool:
    """Return whether a metric of ``final`` of a summary is the plain average of its domains.

    With as many clients in each domain, the mean over the clients is; a test of all images together is none.
    """
    values, whole = list(final.get("domains", {}).get(metric, {}).values()), final.get(metric)
    if not values or whole is None or None in values:
        return False
    return math.isclose(whole, statistics.fmean(values))


def domain_markdown(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table: domains in columns, mean ± std, then the paper's numbers and the differences."""
    domains = [*dict.fromkeys(row["domain"] for row in rows if row["domain"] != AVERAGE), AVERAGE]
    lines = [
        f"# {name}, by domain",
        "",
        table_line(["method", "split", "metric", *domains, "runs"]),
        "|---" * (len(domains) + 4) + "|",
    ]
    keys = ("method", "split", "metric")
    for about in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        own = {row["domain"]: row for row in rows if tuple(row[key] for key in keys) == about}
        (method, split, metric), runs = about, own[AVERAGE]["runs"]
        places = 2 if in_percent(metric) else 4
        blank = {"mean": None, "std": None, "paper": None, "paper-std": None, "difference": None}
        in_order = [own.get(domain, blank) for domain in domains]
        cells = [with_std(row["mean"], row["std"], f".{places}f") for row in in_order]
        lines.append(table_line([method, split, metric, *cells, runs]))
        if any(row["paper"] is not None for row in own.values()):
            papers = [with_std(row["paper"], row["paper-std"], f".{places}f", "") for row in in_order]
            differences = [with_std(row["difference"], None, f"+.{places}f", "") for row in in_order]
            for head, cells in (("the paper's", papers), ("difference", differences)):
                lines.append(table_line([method, split, head, *cells, ""]))
    return "\n".join(lines) + "\n"

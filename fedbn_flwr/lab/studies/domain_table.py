"""A study's metrics by domain, as Table 1 of FedWon (arXiv:2306.05879): the domains and their plain average."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedbn_flwr.lab.studies.rows import (
    AVERAGE,
    WHOLE,
    Grid,
    Page,
    PaperNumber,
    grouped,
    mean_std,
    scale_of,
    with_std,
)
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.training.tasks import in_percent

__all__ = ["FIELDS", "domain_page", "domain_rows", "is_average"]

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
    for (method, split), done in summaries.items():
        for metric in study.metrics or dict.fromkeys(summary["headline"] for summary in done):
            runs = [domains[metric] for s in done if metric in (domains := s["final"].get("domains", {}))]
            stated = study.paper_numbers(f"{method}/{split}") if metric == done[0]["headline"] else {}
            about = {"method": method, "split": split, "metric": metric}
            rows += [{**about, **numbers} for numbers in _numbers(runs, stated, scale_of(metric))]
    return rows


def _numbers(
    runs: Sequence[Mapping[str, float | None]], stated: Mapping[str, PaperNumber], scale: int
) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each domain and of their average, from the values of each run by domain."""
    if not runs:
        return
    domains = list(dict.fromkeys(domain for run in runs for domain in run))
    values: dict[str, list[float]] = {domain: [] for domain in (*domains, *stated, AVERAGE) if domain != WHOLE}
    for run in runs:
        known = {domain: value for domain, value in run.items() if value is not None}
        if len(known) == len(domains):  # an average over other domains is another quantity
            known[AVERAGE] = statistics.fmean(known.values())
        for domain, value in known.items():
            values[domain].append(scale * value)
    for domain, of_runs in values.items():
        paper, (mean, std) = stated.get(domain, PaperNumber()), mean_std(of_runs)
        yield {
            "domain": domain,
            "runs": len(of_runs),
            "mean": mean,
            "std": std,
            "paper": paper.mean,
            "paper-std": paper.std,
            "difference": None if mean is None or paper.mean is None else mean - paper.mean,
        }


def is_average(final: Mapping[str, Any], metric: str) -> bool:
    """Return whether a metric of ``final`` of a summary is the plain average of its domains.

    With as many clients in each domain, the mean over the clients is; a test of all images together is none.
    """
    values, whole = list(final.get("domains", {}).get(metric, {}).values()), final.get(metric)
    if not values or whole is None or None in values:
        return False
    return math.isclose(whole, statistics.fmean(values))


def domain_page(name: str, rows: Sequence[Mapping[str, Any]]) -> Page:
    """Return the rows as a table: domains in columns, mean ± std, then the paper's numbers and the differences."""
    domains = [*dict.fromkeys(row["domain"] for row in rows if row["domain"] != AVERAGE), AVERAGE]
    lines = []
    for (method, split, metric), group in grouped(
        rows, lambda row: (row["method"], row["split"], row["metric"])
    ).items():
        by_domain = {row["domain"]: row for row in group}
        in_order = [by_domain.get(domain, dict.fromkeys(FIELDS)) for domain in domains]
        form = ".2f" if in_percent(metric) else ".4f"
        cells = [with_std(row["mean"], row["std"], form) for row in in_order]
        lines.append([method, split, metric, *cells, by_domain[AVERAGE]["runs"]])
        if any(row["paper"] is not None for row in group):
            papers = [with_std(row["paper"], row["paper-std"], form, "") for row in in_order]
            differences = [with_std(row["difference"], None, f"+{form}", "") for row in in_order]
            lines += [[method, split, "the paper's", *papers, ""], [method, split, "difference", *differences, ""]]
    return Page(f"{name}, by domain", (Grid.of(["method", "split", "metric", *domains, "runs"], lines),))

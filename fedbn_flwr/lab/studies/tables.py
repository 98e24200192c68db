"""The results of a study, as tidy rows in ``results.csv`` and as a table.

A row contains no durations, so a study that was killed and continued has the same rows
as an uninterrupted study.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.lab.results.files import safe_table
from fedbn_flwr.lab.results.folder import DIVERGED_AT
from fedbn_flwr.lab.results.numbers import label_of, shown
from fedbn_flwr.lab.results.ranking import (
    Ranking,
    Result,
    Results,
    of_common_sites,
    ranking,
    remarks,
    result_of,
)
from fedbn_flwr.lab.results.tests_table import metric_in
from fedbn_flwr.lab.studies.one_run import failure_of, is_done, summary_of
from fedbn_flwr.lab.studies.study import AVERAGE, WHOLE, Cell, Study
from fedbn_flwr.training.tasks import in_percent

FIELDS = (
    "method",
    "split",
    "seed",
    "metric",
    "domain",
    "status",
    "final",
    "rounds",
    "exchanges",
    "bytes",
    "rejected",
    "sha256",
)
"""The columns of ``results.csv``: a row for each run and domain.

Shares are in percent; ``bytes`` are bytes of floats, down and up; a missing number is
None. ``domain`` is "" for all test examples and "average" for the plain mean over the
domains. ``rejected`` counts the lost or refused replies of clients. With such replies,
the result does not come from all clients. The metric is the run's main metric.
"""

_FURTHER = "of further seeds"
"""The status in the table of runs with a seed that another method lacks."""


def rows_of(
    study: Study, out: Path, found: Mapping[str, Results]
) -> list[dict[str, Any]]:
    """Return the rows of all runs that ended, in the order of the study.

    The keys are ``FIELDS``, and the values are those of ``found``, see ``outcomes``.
    """
    rows = []
    for cell in study.cells():
        about = {"method": cell.method, "split": cell.split, "seed": cell.seed}
        if is_done(cell, out):
            value = found[cell.split][cell.method][cell.seed].value
            rows += [about | row for row in _rows_of_run(cell, out, value)]
        elif failure_of(cell, out):
            rows.append({**about, "domain": WHOLE, "status": "failed"})
    return rows


def _rows_of_run(
    cell: Cell, out: Path, value: float | None
) -> Iterator[dict[str, Any]]:
    """Yield a row for a finished run with this value, and for each of its domains."""
    summary = summary_of(cell.folder(out))
    final, ledger = summary["final"], summary["ledger"]
    of_run = {
        "status": "diverged" if DIVERGED_AT in summary else "finished",
        "rounds": summary["rounds"],
        "exchanges": ledger.get("exchanges", 0),
        "bytes": ledger.get("bytes-down", 0) + ledger.get("bytes-up", 0),
        "rejected": summary.get("rejected", 0),
        "sha256": summary["sha256"],
    }
    metric = metric_in(summary, prefix=True)
    values = {WHOLE: value, **_domains(final, f"{metric}/")}
    for domain, value in values.items():
        yield {
            **of_run,
            "metric": metric,
            "domain": domain,
            "final": None if value is None else _scale(metric) * value,
        }


def _domains(final: Mapping[str, Any], prefix: str) -> dict[str, float | None]:
    """Return the results by domain, and their plain average.

    ``prefix`` begins the keys of the metric's results by domain.
    """
    by_domain: dict[str, float | None] = {
        key.removeprefix(prefix): value
        for key, value in final.items()
        if key.startswith(prefix)
    }
    known = [value for value in by_domain.values() if value is not None]
    if known:
        # If a domain has no value, give no average, because it would be an average of
        # other domains.
        complete = len(known) == len(by_domain)
        by_domain[AVERAGE] = statistics.fmean(known) if complete else None
    return by_domain


def _scale(metric: str) -> int:
    """Return the factor of a metric in tables: 100 if it is shown in percent, or 1."""
    return 100 if in_percent(metric) else 1


def outcomes(study: Study, out: Path) -> Mapping[str, Results]:
    """Return the results of the finished runs by split, method and seed.

    The methods of a split are compared on their common sites.
    """
    found: dict[str, dict[str, dict[int, Result]]] = {
        split: {method: {} for method in study.methods} for split in study.splits
    }
    for cell in study.cells():
        if is_done(cell, out):
            result = result_of(cell.folder(out))
            found[cell.split][cell.method][cell.seed] = result
    return {split: of_common_sites(results) for split, results in found.items()}


def answers(study: Study, found: Mapping[str, Results]) -> dict[str, Ranking]:
    """Return the comparison of the methods by split, where runs have a result."""
    alone = None
    for name, settings in study.methods.items():
        if settings.get("strategy") == "standalone":
            alone = name
    ranked = {split: ranking(results, alone) for split, results in found.items()}
    return {split: one for split, one in ranked.items() if one}


def marked(
    study: Study, rows: Sequence[Mapping[str, Any]], found: Mapping[str, Results]
) -> pd.DataFrame:
    """Return the table of the tidy rows, with the remarks on each method.

    Compared methods have the means over their common seeds, as in ``ranking``.
    """
    ranked, shown = answers(study, found), []
    for row in rows:
        one, done = ranked.get(row["split"]), row["status"] == "finished"
        if one and done and row["method"] in one.means:
            status = "finished" if row["seed"] in one.seeds else _FURTHER
            row = {**row, "status": status}
        shown.append(row)
    made = table(shown)
    places = zip(made["split"], made["method"], strict=True)
    words = [remarks(found[split][method]) for split, method in places]
    if any(words):
        made["remarks"] = words
    return made


def write_results(study: Study, out: Path) -> pd.DataFrame:
    """Write ``results.csv`` and ``table.md`` of the ended runs, returning the table."""
    found = outcomes(study, out)
    rows = rows_of(study, out, found)
    made = marked(study, rows, found)
    tidy = pd.DataFrame(rows, columns=[*FIELDS], dtype=object)
    write_atomically(out / "results.csv", safe_table(tidy).to_csv(index=False))
    write_atomically(out / "table.md", f"# {study.name}\n\n{markdown(made)}\n")
    return made


def table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the table of the tidy rows, as text.

    It has a line for each split, method and metric, over all domains together. Mean and
    sample standard deviation are over the finished runs with a value. Costs are means
    over all runs that ended. Columns without content are left out.
    """
    frame = pd.DataFrame(rows, columns=[*FIELDS], dtype=object)
    if frame.empty:
        return pd.DataFrame(columns=["split", "method", "metric", "final", "runs"])
    # Count the status of each run once. Take it from all rows, because a failed run has
    # no row with a metric.
    ended = frame.drop_duplicates(["split", "method", "seed"])
    statuses = ended.groupby(["split", "method"])["status"]

    lines = []
    shown = frame[frame["domain"] == WHOLE].fillna({"metric": "-"})
    groups = shown.groupby(["split", "method", "metric"], sort=False)
    for (split, method, metric), runs in groups:
        how = statuses.get_group((split, method)).value_counts()
        # Leave out the line of failed runs, unless all runs of the method failed.
        if metric == "-" and set(how.index) != {"failed"}:
            continue
        # Take the metric of a row, because other methods may have another one of its name.
        metric = runs["metric"].iloc[0]
        name = label_of(metric) if metric != "-" else metric
        line = {"split": split, "method": method, "metric": name}
        lines.append({**line, **_line(runs, how, metric)})
    made = pd.DataFrame(lines).fillna("")
    return made.loc[:, (made != "").any()]


def _line(
    runs: pd.DataFrame, statuses: Mapping[Any, int], metric: str
) -> dict[str, str]:
    """Return the numbers of one line of the table as texts. A missing number is ""."""
    # Costs are means over all runs. Scores are means over the finished runs.
    texts = ["method", "split", "metric", "domain", "status", "sha256"]
    numbers = runs.drop(columns=texts).apply(pd.to_numeric)
    mean = numbers.mean()
    finished = numbers[runs["status"] == "finished"]
    values = finished["final"].dropna()

    # Show the number of runs that the mean lacks, and of runs in which clients are
    # missing.
    counts = {
        "without a value": len(finished) - len(values),
        "with lost replies": (finished["rejected"] > 0).sum(),
        _FURTHER: statuses.get(_FURTHER, 0),
        "diverged": statuses.get("diverged", 0),
        "failed": statuses.get("failed", 0),
    }
    others = [f", {number} {what}" for what, number in counts.items() if number]
    final = ""
    if len(values):
        final = shown(values.mean() / _scale(metric), metric)
    if len(values) > 1:
        final += f" ± {shown(values.std() / _scale(metric), metric)}"
    return {
        "final": final,
        "rounds": _cost(mean["rounds"]),
        "exchanges": _cost(mean["exchanges"]),
        "MB of floats": _cost(mean["bytes"] / 2**20),
        "runs": f"{len(values)}{''.join(others)}",
    }


def _cost(value: float) -> str:
    return "" if pd.isna(value) else shown(value)


def markdown(shown: pd.DataFrame) -> str:
    """Return a table of text as Markdown."""
    # Escape bars, so that they do not end a cell, and asterisks, so that they do not
    # mark emphasis.
    escapes = str.maketrans({"|": "\\|", "*": "\\*", "\n": " "})
    lines = []
    for row in [shown.columns, ["---"] * len(shown.columns), *shown.to_numpy()]:
        cells = [str(cell).translate(escapes) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)

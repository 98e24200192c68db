"""The results of a study: tidy rows in ``results.csv``, and one table with mean,
deviation and the paper's number.

A row has no times, so that a study that was killed and continued has the rows of one
that was not.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.lab.files import lost_lines, read_metrics
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.studies.one_run import failure_of, is_done, summary_of
from fedbn_flwr.lab.studies.study import AVERAGE, WHOLE, Cell, PaperNumber, Study
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of

__all__ = ["FIELDS", "markdown", "paired_tests", "rows_of", "table", "write_results"]

logger = logging.getLogger("flwr")

_TO_TARGET = ("rounds-to-target", "exchanges-to-target", "bytes-to-target")
FIELDS = (
    *("method", "split", "seed", "metric", "domain", "main", "status", "final"),
    *("rounds", "exchanges", "bytes", "target", *_TO_TARGET),
    *("paper", "paper-std", "rejected", "sha256"),
)
"""The columns of ``results.csv``: a row for each run and metric, and for each domain of
it.

Shares are in percent; ``bytes`` are those of floats, down and up; a missing number is
None. ``domain`` is "" for all test examples and "average" for the plain mean over the
domains. ``rejected`` counts the replies of clients that were lost or refused: the
result is then not one of all clients. ``main`` is true for the metric by which methods
are compared, which target and paper are about: the run's main one, or the first that
``metrics`` of the study names.
"""

_ROUNDING = 1e-9  # a target of 50.13 is reached by 5013 of 10000
_NAN = float("nan")


def rows_of(study: Study, out: Path) -> list[dict[str, Any]]:
    """Return the rows of all runs that ended, in the order of the study; their keys are
    of ``FIELDS``.
    """
    rows: list[dict[str, Any]] = []
    for cell in study.cells():
        about = {
            "method": cell.method,
            "split": cell.split,
            "seed": cell.seed,
            "domain": WHOLE,
        }
        if is_done(cell, out):
            rows += [{**about, **row} for row in _rows_of_run(study, cell, out)]
        elif failure_of(cell, out):
            rows.append({**about, "status": "failed"})
    return rows


def _rows_of_run(study: Study, cell: Cell, out: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each metric of a finished run, and for each domain of it."""
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
    metrics = [name for name in study.metrics if name in final] or [summary["headline"]]
    for metric in metrics:
        main = metric == metrics[0]
        papers = study.paper_numbers(f"{cell.method}/{cell.split}") if main else {}
        values = {WHOLE: final.get(metric), **_domains(final, metric)}
        for domain, value in values.items():
            paper = papers.get(domain, PaperNumber())
            row = {**of_run, "metric": metric, "main": main, "domain": domain}
            row |= {"final": None if value is None else _scale(metric) * value}
            row |= {"paper": paper.mean, "paper-std": paper.std}
            if main and domain == WHOLE:
                row |= _until_target(study.target, metric, cell.folder(out), summary)
            yield row


def _domains(final: Mapping[str, Any], metric: str) -> dict[str, float | None]:
    """Return the results by domain and their plain average, which is unknown where one
    of them is.
    """
    by_domain: dict[str, float | None] = dict(final.get("domains", {}).get(metric, {}))
    known = [value for value in by_domain.values() if value is not None]
    if known:
        by_domain[AVERAGE] = (
            statistics.fmean(known) if len(known) == len(by_domain) else None
        )
    return by_domain


def _scale(metric: str) -> int:
    """Return by what tables multiply a metric: shares are in percent."""
    return 100 if in_percent(metric) else 1


def _until_target(
    target: float | None, metric: str, run: Path, summary: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the rounds, exchanges and bytes up to the first test that reached the
    target.
    """
    if target is None:
        return {}
    lines = read_metrics(run / "metrics.jsonl")
    if lost := lost_lines(summary, lines):
        logger.warning("%s/%s", run, lost)
        return {"target": target}
    sign = 1 if higher_is_better(metric) else -1
    exchanges = moved = 0
    for line in lines:
        exchanges += line["exchanges"]
        moved += line["bytes-down"] + line["bytes-up"]
        value = line.get(metric)
        if value is not None and sign * (
            _scale(metric) * value - target
        ) >= -_ROUNDING * abs(target):
            return {
                "target": target,
                **dict(zip(_TO_TARGET, (line["round"], exchanges, moved), strict=True)),
            }
    return {"target": target}


def write_results(study: Study, out: Path) -> pd.DataFrame:
    """Write ``results.csv`` and ``table.md`` of the runs that ended so far; return the
    table.
    """
    rows = rows_of(study, out)
    made = table(rows)
    write_atomically(
        out / "results.csv",
        pd.DataFrame(rows, columns=[*FIELDS], dtype=object).to_csv(index=False),
    )
    write_atomically(out / "table.md", f"# {study.name}\n\n{markdown(made)}\n")
    return made


def table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the table of the tidy rows, as text: a line for each split, method and
    metric.

    A domain has a line where the paper has a number for it; the rows have all. Mean and
    sample standard deviation are those of the runs that finished with a value; costs
    are means of all runs that ended. A column that says nothing in any line is left
    out.
    """
    frame = pd.DataFrame(rows, columns=[*FIELDS], dtype=object)
    if frame.empty:
        return pd.DataFrame(columns=["split", "method", "metric", "final", "runs"])
    tests = paired_tests(rows)
    shown = frame[(frame["domain"] == WHOLE) | frame["paper"].notna()].fillna(
        {"metric": "-"}
    )
    lines = []
    for (split, method, metric, domain), runs in shown.groupby(
        ["split", "method", "metric", "domain"], sort=False
    ):
        of_method = frame[
            (frame["split"] == split) & (frame["method"] == method)
        ].drop_duplicates("seed")
        statuses = of_method["status"].value_counts()
        if metric == "-" and set(statuses.index) != {"failed"}:
            continue  # failed runs have a line only where no other run has one
        line = {"split": split, "method": method, "metric": metric, "domain": domain}
        line |= _line(runs, statuses, in_percent(metric))
        if runs["main"].iloc[0] and domain == WHOLE:
            difference, p = tests.get((split, method), (_NAN, _NAN))
            form = "+.2f" if in_percent(metric) else "+.4f"
            line |= {
                f"minus {frame['method'].iloc[0]}": _number(difference, form),
                "p": _number(p, ".3f"),
            }
        line["metric"] += ", %" * (metric != "-" and in_percent(metric))
        lines.append(line)
    made = pd.DataFrame(lines).fillna("")
    return made.loc[:, (made != "").any()]


def _line(
    runs: pd.DataFrame, statuses: Mapping[Any, int], share: bool
) -> dict[str, str]:
    """Return the numbers of one line of the table as text; "" where there is none."""
    numbers = runs.drop(
        columns=["method", "split", "metric", "domain", "status", "sha256"]
    ).apply(pd.to_numeric)
    finished = numbers[runs["status"] == "finished"]
    values, mean, reached = (
        finished["final"].dropna(),
        numbers.mean(),
        finished["rounds-to-target"].dropna(),
    )
    others = {
        "without a value": len(finished) - len(values),
        "with lost replies": (finished["rejected"] > 0).sum(),
        "diverged": statuses.get("diverged", 0),
        "failed": statuses.get("failed", 0),
    }
    form = ".2f" if share else ".4f"
    line = {
        "final": _number(values.mean(), form, values.std()),
        "rounds": _number(mean["rounds"], ".10g"),
        "exchanges": _number(mean["exchanges"], ".10g"),
        "MB of floats": _number(mean["bytes"] / 2**20, ".2f"),
        "runs": ", ".join(
            [
                str(len(values)),
                *(f"{number} {what}" for what, number in others.items() if number),
            ]
        ),
        "target": _number(mean["target"], "g"),
        "paper": _number(mean["paper"], form, mean["paper-std"]),
        "minus paper": _number(values.mean() - mean["paper"], f"+{form}"),
    }
    if line["target"]:
        line["reached"] = f"{len(reached)} of {len(values)}"
        line["rounds to it"] = _number(reached.mean(), ".1f")
    return line


def _number(value: float, form: str, std: float = _NAN) -> str:
    if pd.isna(value):
        return ""
    return f"{value:{form}}" if pd.isna(std) else f"{value:{form}} ± {std:{form}}"


def paired_tests(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return by split and method the mean difference to the first method of the study,
    and p of the paired t test.

    Runs of two methods with one seed have the same data split and the same initial
    weights, so they are paired by seed. Main metrics of one quantity are compared, also
    of different tests: FedBN's accuracy is that of the clients' models, FedAvg's that
    of the global one. p is NaN with one seed, and where all differences are alike.
    """
    from scipy.stats import ttest_rel

    tests: dict[tuple[str, str], tuple[float, float]] = {}
    frame = pd.DataFrame(rows, columns=[*FIELDS])
    first = frame["method"].iloc[0]
    frame = frame[
        frame["main"].eq(True)
        & (frame["domain"] == WHOLE)
        & (frame["status"] == "finished")
    ]
    for (split, _), of_split in frame.groupby(
        ["split", frame["metric"].map(quantity_of)], sort=False
    ):
        finals = of_split.assign(final=pd.to_numeric(of_split["final"]))
        finals = finals.pivot_table(
            index="seed", columns="method", values="final", sort=False
        )
        for method in finals.columns.drop(first) if first in finals else ():
            both = finals[[method, first]].dropna()
            differences = both[method] - both[first]
            if len(both):
                vary = differences.max() - differences.min() > _ROUNDING
                p = float(ttest_rel(both[method], both[first]).pvalue) if vary else _NAN
                tests[split, method] = float(differences.mean()), p
    return tests


def markdown(shown: pd.DataFrame) -> str:
    """Return a table of text as Markdown, in which asterisks are no emphasis and a
    cell's own bars do not end it.
    """
    cells = [
        list(shown.columns),
        ["---"] * len(shown.columns),
        *shown.to_numpy().tolist(),
    ]
    lines = [
        [
            str(cell).replace("|", "\\|").replace("*", "\\*").replace("\n", " ")
            for cell in row
        ]
        for row in cells
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)

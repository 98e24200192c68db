"""The results of a study: tidy rows in ``results.csv``, and one table with mean, deviation and the paper's number.

A row has no times, so that a study that was killed and continued has the rows of one that was not.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.lab.config import data_of
from fedbn_flwr.lab.files import csv_text, lost_lines, read_metrics
from fedbn_flwr.lab.output.curves import draw_curves
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.output.global_tests import headlines
from fedbn_flwr.lab.studies.one_run import failure_of, is_done, of_study, summary_of
from fedbn_flwr.lab.studies.study import AVERAGE, WHOLE, Cell, PaperNumber, Study
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of

__all__ = ["FIELDS", "StudyResults", "markdown", "paired_tests", "table", "write_results"]

logger = logging.getLogger("flwr")

_KEYS = ("split", "method", "metric", "domain")
_COSTS = ("rounds", "exchanges", "bytes")
_TO_TARGET = ("rounds-to-target", "exchanges-to-target", "bytes-to-target")
FIELDS = (
    *("method", "split", "seed", "metric", "domain", "main", "status", "diverged-at"),
    *("final", "best", "best-round", *_COSTS, "target", *_TO_TARGET),
    *("paper", "paper-std", "rejected", "sha256"),
)
"""The columns of ``results.csv``: a row for each run and metric, and for each domain of it.

Shares are in percent; ``bytes`` are those of floats, down and up; a missing number is None. ``domain`` is "" for all
test examples and "average" for the plain mean over the domains. ``rejected`` counts the replies of clients that were
lost or refused: the result is then not one of all clients. ``main`` is true for the metric by which methods are
compared: the main one, or, if ``metrics`` of the study leaves that out, the first that it names.
"""

_Files = tuple[dict[str, Any], list[dict[str, Any]]]
_ROUNDING = 1e-9  # a target of 50.13 is reached by 5013 of 10000


class StudyResults:
    """The finished and the failed runs of a study; a run's files are read again only if it was repeated.

    Args:
        study: the study.
        out: its folder.
    """

    def __init__(self, study: Study, out: Path) -> None:
        self.study, self.out = study, out
        self._read: dict[Path, tuple[tuple[int, int], _Files | None]] = {}

    def summary(self, cell: Cell) -> dict[str, Any] | None:
        """Return the summary of a run; None if it is not finished, or not with the settings of the study."""
        files = self._files(cell)
        return files[0] if files else None

    def history(self, cell: Cell) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl`` of a run, finished or not; none of one with other settings."""
        if files := self._files(cell):
            return files[1]
        return read_metrics(cell.folder(self.out) / "metrics.jsonl") if of_study(cell, self.out) else []

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all runs that ended, in the order of the study; their keys are ``FIELDS``."""
        absent = self.absent_metrics()
        metrics = [name for name in self.study.metrics if name not in absent]
        rows: list[dict[str, Any]] = []
        for cell in self.study.cells():
            rows += self._rows_of(cell, self.summary(cell), metrics)
        return rows

    def absent_metrics(self) -> list[str]:
        """Return the metrics that the study asks for and that no finished run has."""
        known: set[str] = set()
        for cell in self.study.cells():
            if summary := self.summary(cell):
                known |= {name for name, value in summary["final"].items() if not isinstance(value, Mapping)}
        return [name for name in self.study.metrics if name not in known]

    def _files(self, cell: Cell) -> _Files | None:
        folder = cell.folder(self.out)
        try:
            about = (folder / "summary.json").stat()
            stamp = about.st_mtime_ns, about.st_ino
            if folder not in self._read or self._read[folder][0] != stamp:
                read = summary_of(folder), read_metrics(folder / "metrics.jsonl")
                self._read[folder] = stamp, _complete(*read, folder) if is_done(cell, self.out) else None
        except FileNotFoundError:  # not finished, or set aside at this moment
            return None
        return self._read[folder][1]

    def _rows_of(self, cell: Cell, summary: dict[str, Any] | None, metrics: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield a row for each of these metrics that the run has, and for the main one if it is needed."""
        about: dict[str, Any] = dict.fromkeys(FIELDS)
        about |= {"method": cell.method, "split": cell.split, "seed": cell.seed, "domain": WHOLE}
        if summary is None:
            if failure_of(cell, self.out):
                yield {**about, "status": "failed"}
            return
        about |= {
            "status": "diverged" if DIVERGED_AT in summary else "finished",
            "diverged-at": summary.get(DIVERGED_AT),
            "rejected": summary.get("rejected", 0),
            "sha256": summary["sha256"],
        }
        headline, final = summary["headline"], summary["final"]
        shown = [name for name in metrics if name in final] or [headline]
        compared = headline if headline in shown else shown[0]
        papers = self.study.paper_numbers(f"{cell.method}/{cell.split}")
        if headline not in shown and (papers or self.study.target_of(cell.split) is not None):
            shown = [headline, *shown]  # which target and paper are about
        for metric in shown:
            of_metric = papers if metric == headline else {}
            row = {**about, "metric": metric, "main": metric == compared}
            numbers = self._numbers(cell, summary, metric)
            yield {**row, **numbers, **_beside(of_metric, WHOLE)}
            for domain, value in _domains(final, metric).items():
                by_domain = None if value is None else _scale(metric) * value
                yield {**row, "domain": domain, "final": by_domain, **_beside(of_metric, domain)}

    def _numbers(self, cell: Cell, summary: Mapping[str, Any], metric: str) -> dict[str, Any]:
        """Return the result of a run in a metric, its costs, and what it took to reach the target."""
        lines, up, scale = self.history(cell), higher_is_better(metric), _scale(metric)
        tested = [line for line in lines if line.get(metric) is not None]
        best = (max if up else min)(tested, key=lambda line: line[metric], default={})
        final, highest = summary["final"].get(metric), best.get(metric)
        target = self.study.target_of(cell.split) if metric == summary["headline"] else None
        ledger = summary["ledger"]
        return {
            "final": None if final is None else scale * final,
            "best": None if highest is None else scale * highest,
            "best-round": best.get("round"),
            "rounds": summary["rounds"],
            "exchanges": ledger.get("exchanges", 0),
            "bytes": ledger.get("bytes-down", 0) + ledger.get("bytes-up", 0),
            "target": target,
            **_until(lines, metric, None if target is None else target / scale, up),
        }


def write_results(results: StudyResults) -> pd.DataFrame:
    """Write ``results.csv``, ``table.md`` and ``curves.png`` of the results so far; return the table."""
    study, out, rows = results.study, results.out, results.rows()
    made = table(rows)
    write_atomically(out / "results.csv", csv_text(FIELDS, rows))
    write_atomically(out / "table.md", f"# {study.name}\n\n{markdown(made)}\n")
    # The curves of the first seed that has any: the cells come seed by seed.
    begun = ((cell, history) for cell in study.cells() if (history := results.history(cell)))
    _, of_first_seed = next(itertools.groupby(begun, lambda pair: pair[0].seed), (0, ()))
    curves, main = {}, {}
    scores: dict[str, None] = {}
    for cell, history in of_first_seed:
        name = f"{cell.method}, {cell.split}"
        curves[name], main[name] = history, headlines(cell.config)[0]
        scores[data_of(cell.config).task.score] = None
    write_atomically(out / "curves.png", draw_curves(curves, study.name, [*scores], main))
    return made


def table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the table of the tidy rows, as text: a line for each split, method and metric.

    A domain has a line where the paper has a number for it; the rows have all.

    Mean and sample standard deviation are those of the runs that finished with a value; costs are means of all runs
    that ended. A column that says nothing in any line is left out.
    """
    frame = pd.DataFrame(rows, columns=list(FIELDS))
    if frame.empty:
        return pd.DataFrame(columns=["split", "method", "metric", "final", "runs"])
    frame = frame[(frame["domain"] == WHOLE) | frame["paper"].notna()].copy()
    numbers = ["final", "best", *_COSTS, "target", *_TO_TARGET, "paper", "paper-std", "rejected"]
    frame[numbers] = frame[numbers].apply(pd.to_numeric)
    frame["metric"] = frame["metric"].fillna("-")  # of a run that failed
    finished = frame["status"] == "finished"
    frame["finished"], frame["value"] = finished, frame["final"].where(finished)
    frame["best"] = frame["best"].where(finished)
    frame["lost"] = finished & (frame["rejected"] > 0)
    made = frame.pivot_table(
        index=list(_KEYS),
        aggfunc={
            **{"value": ["mean", "std", "count"], "best": "mean", "finished": "sum", "lost": "sum", "main": "any"},
            **{"target": "first", "paper": "first", "paper-std": "first", "rounds-to-target": ["mean", "count"]},
            **dict.fromkeys((*_COSTS, *_TO_TARGET[1:]), "mean"),
        },
        sort=False,
    )
    made.columns = [name if how not in ("std", "count") else f"{name}-{how}" for name, how in made.columns]
    # pandas leaves out a column without any number.
    made = made.reindex(columns=[*_OF_LINE, *_COSTS, *_TO_TARGET]).reset_index()
    known = made[made["metric"] != "-"].set_index(["split", "method"]).index
    alone = ~made.set_index(["split", "method"]).index.isin(known)
    made = made[(made["metric"] != "-") | alone]  # failed runs have a line only where no other run has one
    of_runs = frame[frame["domain"] == WHOLE].drop_duplicates(["split", "method", "seed"])
    ended = of_runs.pivot_table(index=["split", "method"], columns="status", values="seed", aggfunc="count")
    tests = paired_tests(rows)
    lines = [_as_text(line, ended, tests) for line in made.to_dict("records")]
    shown = pd.DataFrame(lines).fillna("")
    first = frame["method"].iloc[0]
    shown = shown.rename(columns={_TO_FIRST: f"minus {first}"})
    return shown.loc[:, (shown != "").any()]


_TO_FIRST = "minus the first"
_OF_LINE = (
    *("value", "value-std", "value-count", "best", "finished", "lost", "main"),
    *("target", "rounds-to-target-count", "paper", "paper-std"),
)


def _as_text(
    line: Mapping[Any, Any], ended: pd.DataFrame, tests: Mapping[tuple[str, str], tuple[float, float]]
) -> dict[str, str]:
    """Return a line of the table as text; "" where there is no number."""
    share = in_percent(line["metric"])
    form = ".2f" if share else ".4f"
    counts = ended.loc[(line["split"], line["method"])]
    others = {
        "without a value": line["finished"] - line["value-count"],
        "with lost replies": line["lost"],
        "diverged": counts.get("diverged", 0),
        "failed": counts.get("failed", 0),
    }
    others = {what: int(number) for what, number in others.items() if number > 0}  # NaN is not
    text = {name: line[name] for name in ("split", "method")}
    text["metric"] = line["metric"] + ", %" * (share and line["metric"] != "-")
    text["domain"] = line["domain"]
    text["final"] = _number(line["value"], form, line["value-std"])
    text["best"] = _number(line["best"], form)
    text["rounds"] = _number(line["rounds"], ".10g")
    text["exchanges"] = _number(line["exchanges"], ".10g")
    text["MB of floats"] = _number(line["bytes"] / 2**20, ".2f")
    text["runs"] = ", ".join([str(line["value-count"]), *(f"{number} {what}" for what, number in others.items())])
    text["target"] = _number(line["target"], "g")
    if text["target"]:
        text["reached"] = f"{line['rounds-to-target-count']} of {line['value-count']}"
    text["rounds to it"] = _number(line["rounds-to-target"], ".1f")
    text["exchanges to it"] = _number(line["exchanges-to-target"], ".1f")
    text["MB to it"] = _number(line["bytes-to-target"] / 2**20, ".2f")
    text["paper"] = _number(line["paper"], form, line["paper-std"])
    text["minus paper"] = _number(line["value"] - line["paper"], f"+{form}")
    if line["main"] and line["domain"] == WHOLE:
        difference, p = tests.get((line["split"], line["method"]), (float("nan"), float("nan")))
        text[_TO_FIRST] = _number(difference, f"+{form}")
        text["p"] = _number(p, ".3f")
    return text


def _number(value: float, form: str, std: float = float("nan")) -> str:
    if pd.isna(value):
        return ""
    return f"{value:{form}}" if pd.isna(std) else f"{value:{form}} ± {std:{form}}"


def paired_tests(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return by split and method the mean difference to the first method of the study, and p of the paired t test.

    Runs of two methods with one seed have the same data split and the same initial weights, so they are paired by seed.
    Main metrics of one quantity are compared, also of different tests: FedBN's accuracy is that of the clients' models,
    FedAvg's that of the global one. p is NaN with one seed, and where all differences are alike.
    """
    results = [row for row in rows if row["main"] and row["domain"] == WHOLE and row["status"] == "finished"]
    results = [{**row, "quantity": quantity_of(row["metric"])} for row in results if row["final"] is not None]
    tests: dict[tuple[str, str], tuple[float, float]] = {}
    if not results:
        return tests
    from scipy.stats import ttest_rel

    frame, first = pd.DataFrame(results), rows[0]["method"]
    for (split, _), of_split in frame.groupby(["split", "quantity"], sort=False):
        finals = of_split.pivot_table(index="seed", columns="method", values="final")
        if first not in finals:
            continue
        for method in finals.columns.drop(first):
            both = finals[[method, first]].dropna()
            differences = both[method] - both[first]
            if len(both):
                vary = len(both) > 1 and differences.max() - differences.min() > _ROUNDING
                p = float(ttest_rel(both[method], both[first]).pvalue) if vary else float("nan")
                tests[split, method] = float(differences.mean()), p
    return tests


def markdown(shown: pd.DataFrame) -> str:
    """Return a table of text as Markdown, in which asterisks are no emphasis and a cell's own bars do not end it."""
    cells = [list(shown.columns), ["---"] * len(shown.columns), *shown.to_numpy().tolist()]
    lines = [[str(cell).replace("|", "\\|").replace("*", "\\*").replace("\n", " ") for cell in row] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _beside(papers: Mapping[str, PaperNumber], domain: str) -> dict[str, float | None]:
    """Return the paper's number of a domain."""
    paper = papers.get(domain, PaperNumber())
    return {"paper": paper.mean, "paper-std": paper.std}


def _domains(final: Mapping[str, Any], metric: str) -> dict[str, float | None]:
    """Return the results by domain and their plain average, which is unknown where one of them is."""
    by_domain: dict[str, float | None] = dict(final.get("domains", {}).get(metric, {}))
    known = [value for value in by_domain.values() if value is not None]
    if known:
        by_domain[AVERAGE] = statistics.fmean(known) if len(known) == len(by_domain) else None
    return by_domain


def _scale(metric: str) -> int:
    """Return by what tables multiply a metric: shares are in percent."""
    return 100 if in_percent(metric) else 1


def _complete(summary: dict[str, Any], lines: list[dict[str, Any]], folder: Path) -> _Files:
    """Return the files of a finished run; without its lines, and with a warning, if some of them are lost."""
    if lost := lost_lines(summary, lines):
        logger.warning("%s/%s", folder, lost)
        return summary, []
    return summary, [_without_clients(line) for line in lines]


def _without_clients(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tables and curves need of a line, which a sweep keeps to its end: no numbers of each client."""
    return {sys.intern(key): value for key, value in line.items() if not isinstance(value, (dict, list))}


def _until(lines: Sequence[Mapping[str, Any]], metric: str, target: float | None, up: bool) -> dict[str, int | None]:
    """Return the rounds, exchanges and bytes up to the first test that reached the target; None if none did."""
    if target is None:
        return dict.fromkeys(_TO_TARGET)
    sign, slack = 1 if up else -1, _ROUNDING * abs(target)
    exchanges = moved = 0
    for line in lines:
        exchanges += line["exchanges"]
        moved += line["bytes-down"] + line["bytes-up"]
        value = line.get(metric)
        if value is not None and sign * value >= sign * target - slack:
            return dict(zip(_TO_TARGET, (line["round"], exchanges, moved), strict=True))
    return dict.fromkeys(_TO_TARGET)

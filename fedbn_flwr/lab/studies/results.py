"""The results of a study as tidy rows: one for each run and metric.

A row has no times, so that a study that was killed and continued has the rows of one that was not.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr.lab.files import lost_lines, read_metrics
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.studies.domain_table import is_average
from fedbn_flwr.lab.studies.one_run import failure_of, is_done, of_study, summary_of
from fedbn_flwr.lab.studies.rows import AVERAGE, WHOLE, PaperNumber, grouped, scale_of
from fedbn_flwr.lab.studies.study import Cell, Study
from fedbn_flwr.training.tasks import higher_is_better

__all__ = ["FIELDS", "StudyResults"]

logger = logging.getLogger("flwr")

FIELDS = (
    "method",
    "split",
    "seed",
    "metric",
    "main",
    "status",
    "diverged-at",
    "final",
    "best",
    "best-round",
    "rounds",
    "exchanges",
    "bytes",
    "target",
    "rounds-to-target",
    "exchanges-to-target",
    "bytes-to-target",
    "paper",
    "paper-std",
    "rejected",
    "sha256",
)
"""The columns. Shares are in percent; ``bytes`` are those of floats, down and up; a missing number is None.

``rejected`` counts the replies of clients that were lost or refused: the result is then not one of all clients.

``main`` is true for the metric by which the run is compared with others: its main one, or, if ``metrics`` of the study
leaves that out, the first that it names.
"""


_Files = tuple[dict[str, Any], list[dict[str, Any]]]
_ROUNDING = 1e-9  # a target of 50.13 is reached by 5013 of 10000
_TO_TARGET = ("rounds-to-target", "exchanges-to-target", "bytes-to-target")


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
        cells = [(cell, self.summary(cell)) for cell in self.study.cells()]
        known = {name for _, summary in cells for name in _numbers_of(summary)}
        metrics = [name for name in self.study.metrics if name in known]
        return [row for cell, summary in cells for row in self._rows_of(cell, summary, metrics)]

    def absent_metrics(self) -> list[str]:
        """Return the metrics that the study asks for and that no finished run has."""
        known = {name for cell in self.study.cells() for name in _numbers_of(self.summary(cell))}
        return [name for name in self.study.metrics if name not in known]

    def unused_papers(self) -> list[str]:
        """Return the METHOD/SPLIT with a paper's number that no result is compared with.

        The pair is in ``skip``, or its numbers are by domain and its data have none.
        """
        unused, cells = [], grouped(self.study.cells(), lambda cell: f"{cell.method}/{cell.split}")
        for name in self.study.paper:
            ended = [summary for cell in cells.get(name, ()) if (summary := self.summary(cell))]
            by_domain = WHOLE not in self.study.paper_numbers(name)
            if name not in cells or (by_domain and ended and not any("domains" in s["final"] for s in ended)):
                unused.append(name)
        return unused

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
        about |= {"method": cell.method, "split": cell.split, "seed": cell.seed}
        if summary is None:
            if failure_of(cell, self.out):
                yield {**about, "status": "failed"}
            return
        ledger = summary["ledger"]
        about |= {
            "status": "diverged" if DIVERGED_AT in summary else "finished",
            "diverged-at": summary.get(DIVERGED_AT),
            "rounds": summary["rounds"],
            "exchanges": ledger.get("exchanges", 0),
            "bytes": ledger.get("bytes-down", 0) + ledger.get("bytes-up", 0),
            "rejected": summary.get("rejected", 0),
            "sha256": summary["sha256"],
        }
        headline = summary["headline"]
        shown = [name for name in metrics if name in summary["final"]] or [headline]
        compared = headline if headline in shown else shown[0]
        wanted = self.study.target_of(cell.split) is not None or f"{cell.method}/{cell.split}" in self.study.paper
        if wanted and headline not in shown:
            shown = [headline, *shown]  # which target and paper are about
        for metric in shown:
            yield {**about, "metric": metric, "main": metric == compared, **self._numbers(cell, summary, metric)}

    def _numbers(self, cell: Cell, summary: Mapping[str, Any], metric: str) -> dict[str, Any]:
        """Return the results of a run in a metric; target and paper are about the main one."""
        lines, up = self.history(cell), higher_is_better(metric)
        tested = [line for line in lines if line.get(metric) is not None]
        best = (max if up else min)(tested, key=lambda line: line[metric], default={})
        main = metric == summary["headline"]
        target = self.study.target_of(cell.split) if main else None
        papers = self.study.paper_numbers(f"{cell.method}/{cell.split}") if main else {}
        if is_average(summary["final"], metric):
            papers = {WHOLE: papers.get(AVERAGE, PaperNumber()), **papers}
        paper = papers.get(WHOLE, PaperNumber())
        scale, final, highest = scale_of(metric), summary["final"].get(metric), best.get(metric)
        return {
            "final": None if final is None else scale * final,
            "best": None if highest is None else scale * highest,
            "best-round": best.get("round"),
            "target": target,
            "paper": paper.mean,
            "paper-std": paper.std,
            **_until(lines, metric, None if target is None else target / scale, up),
        }


def _complete(summary: dict[str, Any], lines: list[dict[str, Any]], folder: Path) -> _Files:
    """Return the files of a finished run; without its lines, and with a warning, if some of them are lost."""
    if lost := lost_lines(summary, lines):
        logger.warning("%s/%s", folder, lost)
        return summary, []
    return summary, [_without_clients(line) for line in lines]


def _without_clients(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tables and curves need of a line, which a sweep keeps to its end: no numbers of each client."""
    return {sys.intern(key): value for key, value in line.items() if not isinstance(value, (dict, list))}


def _numbers_of(summary: Mapping[str, Any] | None) -> list[str]:
    """Return the metrics of a run that are numbers; others are mappings, by domain or by client."""
    return [name for name, value in summary["final"].items() if not isinstance(value, Mapping)] if summary else []


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

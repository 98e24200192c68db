"""The files of a study's folder, finished or not."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.files import STUDY_FILE
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.report.run_files import RunFiles
from fedbn_flwr.lab.studies.cell import Cell
from fedbn_flwr.lab.studies.done import failure_of, of_study
from fedbn_flwr.lab.studies.results import StudyResults
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.lab.studies.tables import table_rows

__all__ = ["StudyFiles"]


@dataclass(frozen=True)
class StudyFiles:
    """What a study's folder holds at one time.

    Attributes:
        folder: the folder.
        study: the study, with the settings of the command.
        runs: each run that has begun with the settings of the study, and its files.
    """

    folder: Path
    study: Study
    runs: Sequence[tuple[Cell, RunFiles]]

    @classmethod
    def read(cls, folder: Path) -> StudyFiles:
        """Read a folder; the data of its runs need not be here.

        Raises:
            ConfigError: this version cannot read the study, or one of its runs.
        """
        study = Study.read(folder / STUDY_FILE)
        runs = []
        for cell in study.cells():
            if (begun := cell.folder(folder) / "config.yaml").is_file() and of_study(cell, folder):
                try:
                    runs.append((cell, RunFiles.read(cell.folder(folder))))
                except FedBNError:
                    if begun.is_file():  # not one that a sweep has set aside at this moment
                        raise
        return cls(folder, study, runs)

    @functools.cached_property
    def cells(self) -> list[Cell]:
        """All runs of the study."""
        return list(self.study.cells())

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The tidy rows of the runs that ended; see ``StudyResults``."""
        return self._results.rows()

    @functools.cached_property
    def _results(self) -> StudyResults:
        return StudyResults(self.study, self.folder)

    @functools.cached_property
    def table(self) -> list[dict[str, Any]]:
        """The rows of the table of means."""
        return table_rows(self.study, self.rows)

    def status(self, cell: Cell) -> str:
        """Return "finished", "diverged", "failed", "running" (or interrupted), "to repeat" or "not begun".

        A run is to be repeated if it began with other settings than the study's.
        """
        folder = cell.folder(self.folder)
        if summary := self._results.summary(cell):
            return "diverged" if DIVERGED_AT in summary else "finished"
        if failure_of(cell, self.folder):
            return "failed"
        if not (folder / "config.yaml").is_file():
            return "not begun"
        return "running" if of_study(cell, self.folder) else "to repeat"

    @property
    def ended(self) -> bool:
        """Whether every run is finished or failed."""
        return all(self.status(cell) in ("finished", "diverged", "failed") for cell in self.cells)

    def of(self, method: str, split: str) -> list[RunFiles]:
        """Return the runs of a method and split that stand for it.

        These are the finished ones that did not diverge, as in the means; without one, the longest of the others.
        """
        runs = [run for cell, run in self.runs if (cell.method, cell.split) == (method, split) and run.lines]
        done = [run for run in runs if run.summary and DIVERGED_AT not in run.summary]
        return done or sorted(runs, key=lambda run: len(run.lines))[-1:]

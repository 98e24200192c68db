"""The files of the folder of a run or a study, finished or not."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.config import STATE_IN_OUT, Config
from fedbn_flwr.lab.files import STUDY_FILE, ledger_of, lost_lines, read_json, read_metrics
from fedbn_flwr.lab.finished_runs.saved_model import run_config
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.output.global_tests import headlines
from fedbn_flwr.lab.report.figures import BYTES, EXCHANGES, ROUNDS
from fedbn_flwr.lab.report.shown import MEBIBYTE
from fedbn_flwr.lab.studies.one_run import failure_of, of_study
from fedbn_flwr.lab.studies.results import StudyResults
from fedbn_flwr.lab.studies.study import Cell, Study
from fedbn_flwr.lab.studies.tables import table_rows
from fedbn_flwr.training.tasks import higher_is_better

__all__ = ["RunFiles", "StudyFiles"]

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """What a run's folder holds at one time.

    Attributes:
        folder: the folder.
        config: the settings.
        lines: the lines of ``metrics.jsonl``; none of a finished run that has lost some.
        summary: ``summary.json``; empty while the run is not finished.
        lost: what is left out where lines are lost; "" if none is.
    """

    folder: Path
    config: Config
    lines: list[dict[str, Any]]
    summary: dict[str, Any]
    lost: str = ""

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read a folder.

        Raises:
            ConfigError: it is no folder of a run, or this version cannot read it.
        """
        config = run_config(folder)
        summary = read_json(folder / "summary.json")  # before the lines: with a summary they are complete
        lines = read_metrics(folder / "metrics.jsonl")
        lost = lost_lines(summary, lines) if summary else ""
        return cls(folder, config, [] if lost else lines, summary, lost)

    @property
    def rounds(self) -> int:
        """The rounds that are done."""
        return int(self.summary.get("rounds", len(self.lines)))

    @functools.cached_property
    def seconds(self) -> float:
        """The time of these rounds."""
        return float(self.summary.get("seconds") or sum(line["seconds"] for line in self.lines))

    @functools.cached_property
    def diverged_at(self) -> int:
        """The first round with a loss that is not finite; 0 = none."""
        first = next((line[DIVERGED_AT] for line in self.lines if DIVERGED_AT in line), 0)
        return int(self.summary.get(DIVERGED_AT) or first)

    @property
    def divergence(self) -> str:
        """Which losses are not finite in that round."""
        losses: list[str] = next((line["diverged"] for line in self.lines if "diverged" in line), [])
        return "; ".join(losses) or "a loss is not finite"

    @functools.cached_property
    def headline(self) -> str:
        """The key of the main metric."""
        try:
            return str(self.summary.get("headline") or headlines(self.config)[0])
        except FedBNError:  # its own data are not here
            keys = (key for line in self.lines for key in line if key.startswith(("test-", "personal-")))
            return next((key for key in keys if not key.endswith("-loss")), "test-loss")

    @functools.cached_property
    def measured(self) -> list[dict[str, Any]]:
        """The lines that have the main metric."""
        return [line for line in self.lines if line.get(self.headline) is not None]

    @functools.cached_property
    def final(self) -> Line:
        """The figures of the result; while the run is not finished those of the last line with the main metric."""
        return self.summary.get("final") or (self.measured[-1] if self.measured else {})

    @functools.cached_property
    def best(self) -> Line:
        """The line with the best main metric."""
        choose = max if higher_is_better(self.headline) else min
        return choose(self.measured, key=lambda line: line[self.headline], default={})

    @functools.cached_property
    def over(self) -> dict[str, list[float]]:
        """By unit the place of each line: rounds, exchanges so far, and MiB of floats so far, those of training."""
        moved = (line.get("bytes-down", 0) + line.get("bytes-up", 0) for line in self.lines)
        return {
            ROUNDS: [line["round"] for line in self.lines],
            EXCHANGES: list(itertools.accumulate(line.get("exchanges", 0) for line in self.lines)),
            BYTES: [round(total / MEBIBYTE, 6) for total in itertools.accumulate(moved)],
        }

    @functools.cached_property
    def totals(self) -> dict[str, int]:
        """The sums of the rounds' traffic and examples."""
        return dict(self.summary.get("ledger") or ledger_of(self.lines))

    @functools.cached_property
    def chosen(self) -> dict[str, Any]:
        """The settings without which the run would be another one, in the order of the table of all keys."""
        settings = _without_folder(self.config)
        defaults = {field.alias: field.default for field in Config.model_fields.values()}
        chosen = {key: value for key, value in settings.items() if value != defaults[key]}
        for key in list(chosen):  # what follows from the others, such as a method's own default
            rest = {name: value for name, value in chosen.items() if name != key}
            if _makes(rest, settings):
                chosen = rest
        return chosen

    @functools.cached_property
    def repeatable(self) -> bool:
        """Whether ``chosen`` gives the run's settings here: not if its own data are elsewhere."""
        return _makes(self.chosen, _without_folder(self.config))

    def json(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the folder; empty without it."""
        return read_json(self.folder / name)


def _makes(values: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether these values give these settings."""
    try:
        return _without_folder(Config.make(values)) == settings
    except FedBNError:
        return False


def _without_folder(config: Config) -> dict[str, Any]:
    """Return the settings of a run, as they are in a new folder."""
    state_dir = "" if config.state_dir == STATE_IN_OUT else config.state_dir
    return config.model_copy(update={"out": "", "resume": False, "state_dir": state_dir}).to_mapping()


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

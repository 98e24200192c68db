"""Doing the runs of a study, one after another or several at a time.

A finished run (with ``summary.json``) is skipped, and an unfinished or failed one is
resumed from its last checkpoint. A run whose folder has other settings than the study
is repeated, and so is an unfinished one without a usable checkpoint; the former folder
is renamed, never removed. A run has the same bits alone, in series and in parallel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

import pandas as pd
import yaml

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, FedBNError, RunFailedError
from fedbn_flwr.lab.config.yaml_text import read_yaml
from fedbn_flwr.lab.files import STUDY_FILE
from fedbn_flwr.lab.output.folder import DIVERGED_AT, lock_folder, writing
from fedbn_flwr.lab.output.recorder import OnRound
from fedbn_flwr.lab.partitioned.counts import has_other_data
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.runs.start_checks import check
from fedbn_flwr.lab.studies.one_run import (
    changed,
    do_cell,
    finished,
    is_done,
    summary_of,
)
from fedbn_flwr.lab.studies.results import write_results
from fedbn_flwr.lab.studies.study import Cell, Study
from fedbn_flwr.lab.studies.study_checks import EVERYTHING, Selection
from fedbn_flwr.lab.studies.tuning import tuned, tuning_markdown

__all__ = ["Follower", "LogFollower", "Runner", "in_series", "sweep"]

logger = logging.getLogger("flwr")

_AGAIN = "give the same command again"


class Follower(Protocol):
    """Is told what happens in a sweep."""

    def plan(self, cells: Sequence[Cell], left: Sequence[Cell]) -> None:
        """Take note of all runs of a phase, and of those that are left to do."""

    def begin(self, cell: Cell) -> OnRound | None:
        """Take note that a run begins; the return value is called with each new line of
        its ``metrics.jsonl``.
        """

    def end(self, cell: Cell, error: str) -> None:
        """Take note that a run ended; ``error`` is "" if it is finished."""


class LogFollower:
    """A follower that logs the runs that failed."""

    def plan(self, cells: Sequence[Cell], left: Sequence[Cell]) -> None:
        """Do nothing."""

    def begin(self, cell: Cell) -> OnRound | None:
        """Do nothing."""
        return None

    def end(self, cell: Cell, error: str) -> None:
        """Log the error, if there is one."""
        if error:
            logger.error("%s: %s", cell.name, error)


Outcome = tuple[Cell, str]
Runner = Callable[[Sequence[Cell], Path, Follower], Generator[Outcome]]
"""Does runs and yields each that ended, with its error or ""."""


def sweep(
    study: Study,
    out: Path,
    runner: Runner | None = None,
    follower: Follower | None = None,
    selection: Selection = EVERYTHING,
) -> pd.DataFrame:
    """Do the unfinished runs of a study, write its table and return it.

    Args:
        study: the grid. Its trials, if it has ``tune``, are done first; ``tuning.md``
            shows them.
        out: folder of all runs; ``write_results`` names the files of results.
            ``study.yaml`` is the study with the settings of the command and the tuned
            ones.
        runner: does the runs; ``in_series`` by default, ``parallel.in_parallel`` on
            several cores.
        follower: is told what happens; by default a ``LogFollower``.
        selection: the runs to do now. The tables show all that the folder has.

    Raises:
        ConfigError: another process writes to the folder, it is that of a run or of
            another study, data cannot be used, finished runs are of other data, or what
            is selected is not in the study; nothing was done.
        EngineError: the study's own files cannot be written; the runs stay.
        RunFailedError: trials failed; or runs failed, trained nothing, or diverged and
            their ``on-divergence`` is "stop". All other runs are finished, and the
            error holds the table. The same call tries the failed ones again.
    """
    runner, follower = runner or in_series, follower or LogFollower()
    selection.check(study)
    _log_dropped(study, selection)
    with lock_folder(out, "study"):
        _refuse_folder_of_another(study, out)
        _check_before(study, out, selection)
        if trials := [cell for cell in study.trials() if cell in selection]:
            study = _tune(study, trials, out, runner, follower)
        else:
            (out / "tuning.md").unlink(missing_ok=True)
        _write(study, out)
        cells = [cell for cell in study.cells() if cell in selection]
        with writing(out, _AGAIN):
            # a sweep that is stopped leaves no tables of other settings
            write_results(study, out)
        _do_all(cells, out, runner, follower)
        with writing(out, _AGAIN):
            table = write_results(study, out)
    if absent := _absent_metrics(study, out):
        logger.warning("metrics: no run of this study has %s", ", ".join(absent))
    if failed := [cell.name for cell in cells if _failed(cell, out)]:
        message = (
            f"{len(failed)} of {len(cells)} runs failed or diverged:"
            f" {', '.join(failed)}"
        )
        raise RunFailedError(message, table)
    return table


def _log_dropped(study: Study, selection: Selection) -> None:
    """Log once for each METHOD/SPLIT which keys of ``base`` have no effect there."""
    dropped: dict[tuple[str, str, str], str] = {}
    for cell in study.cells():
        if cell in selection:
            dropped |= {
                (cell.method, cell.split, key): why for key, why in cell.dropped.items()
            }
    for (method, split, key), why in dropped.items():
        logger.warning("%s/%s: %s of base is left out: %s", method, split, key, why)


def _check_before(study: Study, out: Path, selection: Selection) -> None:
    """Raise ConfigError if the data of a run that is left cannot be used, or finished
    ones are of other data.
    """
    cells = [*study.trials(), *study.cells()]
    done = [cell for cell in cells if is_done(cell, out)]
    left = [cell for cell in cells if cell in selection and cell not in done]
    _check_data(left)
    if left:
        _refuse_results_of_other_data(done, out)


def _tune(
    study: Study, trials: Sequence[Cell], out: Path, runner: Runner, follower: Follower
) -> Study:
    """Do the trials, write ``tuning.md`` and return the study with the chosen settings.

    Raises:
        RunFailedError: trials failed.
    """
    # a former one has the settings that its tables are of
    if not (out / STUDY_FILE).exists():
        _write(study, out)
    _do_all(trials, out, runner, follower)
    _refuse_lost(trials, out)
    results, chosen = tuned(study, out)
    with writing(out, _AGAIN):
        write_atomically(out / "tuning.md", tuning_markdown(study.name, results))
    return study.with_chosen(chosen)


def in_series(
    cells: Sequence[Cell], out: Path, follower: Follower
) -> Generator[Outcome]:
    """Do one run after another, in this process."""
    for cell in cells:
        yield cell, do_cell(cell, out, follower.begin(cell))


def _do_all(
    cells: Sequence[Cell], out: Path, runner: Runner, follower: Follower
) -> None:
    """Do the runs that are left."""
    left = [cell for cell in cells if not is_done(cell, out)]
    for cell in left:
        if finished(folder := cell.folder(out)):
            other = changed(cell.config, folder)
            logger.warning(
                "%s is repeated, its settings are not the study's: %s", cell.name, other
            )
    follower.plan(cells, left)
    if left:
        # ends the other runs if something fails here
        with closing(runner(left, out, follower)) as outcomes:
            for cell, error in outcomes:
                follower.end(cell, error)


def _write(study: Study, out: Path) -> None:
    with writing(out, _AGAIN):
        write_atomically(
            out / STUDY_FILE,
            yaml.safe_dump(study.to_mapping(), sort_keys=False, allow_unicode=True),
        )


def _absent_metrics(study: Study, out: Path) -> list[str]:
    """Return the metrics that the study asks for and that no finished run has."""
    finals = [summary_of(cell.folder(out)).get("final", {}) for cell in study.cells()]
    return [
        name for name in study.metrics if not any(name in final for final in finals)
    ]


def _refuse_folder_of_another(study: Study, out: Path) -> None:
    """Raise ConfigError if the folder is that of a run or of another study: their files
    would be replaced.
    """
    if (out / "config.yaml").exists():
        raise ConfigError(
            f"out={str(out)!r} is the folder of a run; choose another folder for a"
            " study."
        )
    content = (
        read_yaml(out / STUDY_FILE, "study") if (out / STUDY_FILE).exists() else None
    )
    if (
        isinstance(content, dict)
        and (name := content.get("name", study.name)) != study.name
    ):
        raise ConfigError(
            f"out={str(out)!r} has the study {name!r}, whose tables those of"
            f" {study.name!r} would replace. Choose another folder, or give the study"
            " its former name."
        )


def _refuse_lost(trials: Sequence[Cell], out: Path) -> None:
    """Raise RunFailedError if trials have no result: without them another setting could
    be chosen.
    """
    if lost := [cell.name for cell in trials if not is_done(cell, out)]:
        raise RunFailedError(
            f"{len(lost)} of {len(trials)} trials of tune failed: {', '.join(lost)}."
            " Nothing was chosen; the same command tries them again. (A trial that"
            " diverges is a result: its setting is not chosen.)"
        )


def _check_data(cells: Sequence[Cell]) -> None:
    """Raise ConfigError with all problems of the data and their splits, before any
    work.
    """
    problems: dict[str, str] = {}
    for cell in {(cell.method, cell.split): cell for cell in reversed(cells)}.values():
        try:
            check(cell.config)
            partitioned_data(cell.config, count_clients(cell.config))
        except FedBNError as error:
            problems.setdefault(str(error), cell.name)
    if problems:
        raise ConfigError(
            "\n".join(f"{name}: {error}" for error, name in reversed(problems.items()))
        )


def _refuse_results_of_other_data(done: Sequence[Cell], out: Path) -> None:
    """Raise ConfigError if own data have changed since runs of the study: a table would
    compare results of both.
    """
    if other := [
        cell.name for cell in done if has_other_data(cell.folder(out), cell.config)
    ]:
        shown = ", ".join(other[:3] + (["..."] if len(other) > 3 else []))
        raise ConfigError(
            f"{len(other)} finished runs of the study in {out} ({shown}) are of other"
            " data: those of dataset have changed since, or are divided in another"
            " way. Restore the data, or choose another --out."
        )


def _failed(cell: Cell, out: Path) -> bool:
    """Return whether a run is not done, or says that it diverged although
    ``on-divergence`` is "stop".
    """
    stop = cell.config.on_divergence == "stop"
    return not is_done(cell, out) or (
        stop and DIVERGED_AT in summary_of(cell.folder(out))
    )

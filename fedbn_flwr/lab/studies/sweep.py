"""Do the runs of a study, one after another or several at a time.

A finished run (with ``summary.json``) is skipped, and has no checkpoints. An unfinished
or failed run is resumed from its last checkpoint. A run starts again if its folder has
other settings than the study, or if it is unfinished without a usable checkpoint. Its
old folder is renamed, never removed. A run has the same bits by itself, in series and
in parallel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

import pandas as pd

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, FedBNError, RunFailedError
from fedbn_flwr.lab.config.yaml_text import as_yaml, read_yaml
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.results.files import STUDY_FILE
from fedbn_flwr.lab.results.folder import DIVERGED_AT, lock_folder, writing
from fedbn_flwr.lab.results.result_writer import OnRound
from fedbn_flwr.lab.results.same_data import has_other_data
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.studies.check_study import EVERYTHING, Selection
from fedbn_flwr.lab.studies.one_run import (
    changed,
    do_cell,
    finished,
    is_done,
    summary_of,
)
from fedbn_flwr.lab.studies.study import TUNE, Cell, Study
from fedbn_flwr.lab.studies.tables import write_results
from fedbn_flwr.lab.studies.tuning import tuned, tuning_markdown

__all__ = ["Follower", "LogFollower", "Runner", "in_series", "sweep"]

logger = logging.getLogger("flwr")

_AGAIN = "give the same command again"


class Follower(Protocol):
    """An observer of the events in a sweep."""

    def plan(self, name: str, left: int) -> None:
        """Note the name of a study, and the number of its runs that are left to do."""

    def begin(self, cell: Cell) -> OnRound | None:
        """Note that a run begins. Return a function for its lines of metrics, or None."""

    def end(self, cell: Cell, error: str) -> None:
        """Note that a run ended. ``error`` is "" if the run has no error."""


class LogFollower:
    """A follower that logs the runs that failed."""

    def plan(self, name: str, left: int) -> None:
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
"""Does runs and yields each run that ended, with its error or ""."""


def sweep(
    study: Study,
    out: Path,
    runner: Runner | None = None,
    follower: Follower | None = None,
    selection: Selection = EVERYTHING,
) -> pd.DataFrame:
    """Do the unfinished runs of a study, write its table and return it.

    Args:
        study: the grid. If it has ``tune``, its trials are done first; ``tuning.md``
            shows their scores.
        out: folder of all runs; ``write_results`` names the files of results.
            ``study.yaml`` is the study with the settings of the command and the tuned
            settings.
        runner: does the runs; ``in_series`` by default, ``parallel.in_parallel`` on
            several cores.
        follower: observes the sweep; by default a ``LogFollower``.
        selection: the runs to do now. The tables show all runs in the folder.

    Raises:
        ConfigError: another process writes to the folder, the folder belongs to a run
            or to another study, data cannot be used, finished runs have other data, or
            a selected name is not in the study; nothing was done.
        EngineError: the study's own files cannot be written; the runs stay.
        RunFailedError: trials failed; or runs failed, trained nothing, or diverged and
            their ``on-divergence`` is "stop". All other runs are finished, and the
            error contains the table. The same call tries the failed runs again.
    """
    runner = runner or in_series
    follower = follower or LogFollower()
    selection.check(study)
    _log_dropped(study, selection)
    with lock_folder(out, "study"):
        _refuse_folder_of_another(study, out)
        # Keep an existing study file, because it has the settings of the tables in the
        # folder.
        _check_before(study, out, selection)
        if not (out / STUDY_FILE).exists():
            _write(study, out)

        # The trials are a study of their own. Its scores choose settings of the runs.
        tuning = study.tuning()
        if tuning is None:
            (out / "tuning.md").unlink(missing_ok=True)
        else:
            trials, of_trials = out / TUNE, selection.of_tuning(study)
            left = _do_runs(tuning, trials, runner, follower, of_trials)
            _refuse_lost(left, trials)
            results, chosen = tuned(study, out)
            for one in results:
                if one.warning:
                    logger.warning("%s: %s", one.name, one.warning)
            with writing(out, _AGAIN):
                markdown = tuning_markdown(study.name, results)
                write_atomically(out / "tuning.md", markdown)
            study = study.with_chosen(chosen)

        # Also write the results before the runs. Otherwise, a stopped sweep could leave
        # tables of other settings.
        _write(study, out)
        with writing(out, _AGAIN):
            write_results(study, out)
        cells = _do_runs(study, out, runner, follower, selection)
        with writing(out, _AGAIN):
            table = write_results(study, out)

    failed = [cell.name for cell in cells if _failed(cell, out)]
    if failed:
        message = (
            f"{len(failed)} of {len(cells)} runs failed or diverged:"
            f" {', '.join(failed)}"
        )
        raise RunFailedError(message, table)
    return table


def _do_runs(
    study: Study, out: Path, runner: Runner, follower: Follower, selection: Selection
) -> list[Cell]:
    """Do the selected runs of a study in their order, and return them all.

    A finished run with the settings of the study is skipped. ``do_cell`` resumes a run
    from its last checkpoint if it has one, and otherwise starts it. The folder of a run
    with other settings is renamed first.
    """
    cells = [cell for cell in study.cells() if cell in selection]
    left = [cell for cell in cells if not is_done(cell, out)]
    for cell in left:
        folder = cell.folder(out)
        if finished(folder):
            other = changed(cell.config, folder)
            logger.warning(
                "%s is repeated. Its settings are not the study's: %s", cell.name, other
            )
    follower.plan(study.name, len(left))
    if left:
        # ``closing`` ends the other runs if an error occurs here.
        with closing(runner(left, out, follower)) as outcomes:
            for cell, error in outcomes:
                follower.end(cell, error)
    return cells


def in_series(
    cells: Sequence[Cell], out: Path, follower: Follower, workers: int | None = None
) -> Generator[Outcome]:
    """Do one run after another, in this process and ``workers`` worker processes."""
    for cell in cells:
        yield cell, do_cell(cell, out, follower.begin(cell), workers)


def _log_dropped(study: Study, selection: Selection) -> None:
    """Log once for each METHOD/SPLIT which keys of ``base`` have no effect there."""
    dropped = {}
    for cell in study.cells():
        if cell in selection:
            for key, why in cell.dropped.items():
                dropped[f"{cell.method}/{cell.split}", key] = why
    for (name, key), why in dropped.items():
        logger.warning("%s: %s of base is left out: %s", name, key, why)


def _check_before(study: Study, out: Path, selection: Selection) -> None:
    """Raise ConfigError if data cannot be used, or finished runs have other data.

    These faults would otherwise fail a run, or mislead, after hours.
    """
    left, done = list[Cell](), list[tuple[Cell, Path]]()
    for folder, grid in study.grids(out).items():
        selected = selection if grid is study else selection.of_tuning(study)
        for cell in grid.cells():
            if is_done(cell, folder):
                done.append((cell, folder))
            elif cell in selected:
                left.append(cell)
    check_data(left)
    if left:
        _refuse_results_of_other_data(done, out)


def _write(study: Study, out: Path) -> None:
    content = as_yaml(study.to_mapping())
    with writing(out, _AGAIN):
        write_atomically(out / STUDY_FILE, content)


def _refuse_folder_of_another(study: Study, out: Path) -> None:
    """Raise ConfigError if the folder belongs to a run or to another study."""
    # Refuse the folder, because the sweep would replace its files.
    if (out / "config.yaml").exists():
        raise ConfigError(
            f"out={str(out)!r} is the folder of a run. Choose another folder for a"
            " study."
        )
    if not (out / STUDY_FILE).exists():
        return
    content = read_yaml(out / STUDY_FILE, "study")
    # A file without a name may be replaced.
    name = content.get("name", study.name)
    if name != study.name:
        raise ConfigError(
            f"out={str(out)!r} has the study {name!r}. The tables of {study.name!r}"
            " would replace its tables. Choose another folder, or give the study"
            " its former name."
        )


def _refuse_lost(trials: Sequence[Cell], out: Path) -> None:
    """Raise RunFailedError if trials have no result."""
    # Require all results, because without them another setting could be chosen.
    lost = [cell.name for cell in trials if not is_done(cell, out)]
    if lost:
        raise RunFailedError(
            f"{len(lost)} of {len(trials)} trials of tune failed: {', '.join(lost)}."
            " Nothing was chosen. The same command tries them again. (A trial that"
            " diverges is a result: its setting is not chosen.)"
        )


def check_data(cells: Sequence[Cell]) -> None:
    """Raise ConfigError if runs cannot start, with all problems of config and data."""
    # Check the first run of each pair of method and split, because all seeds have the
    # same data. If several runs have the same problem, name the first of them.
    first = {(cell.method, cell.split): cell for cell in reversed(cells)}
    problems: dict[str, str] = {}
    for cell in first.values():
        try:
            checked_config(cell.config)
            partitioned_data(cell.config, count_clients(cell.config))
        except FedBNError as error:
            problems.setdefault(str(error), cell.name)
    if problems:
        lines = [f"{name}: {error}" for error, name in reversed(problems.items())]
        raise ConfigError("\n".join(lines))


def _refuse_results_of_other_data(done: Sequence[tuple[Cell, Path]], out: Path) -> None:
    """Raise ConfigError if own data have changed since finished runs of the study."""
    # Refuse changed data, because a table would compare results of different data.
    other = [
        cell.name
        for cell, folder in done
        if has_other_data(cell.folder(folder), cell.config)
    ]
    if other:
        shown = ", ".join(other[:3])
        if len(other) > 3:
            shown += ", ..."
        raise ConfigError(
            f"{len(other)} finished runs of the study in {out} ({shown}) have other"
            " data: their dataset has changed since these runs, or is divided in another"
            " way. Restore the data, or choose another --out."
        )


def _failed(cell: Cell, out: Path) -> bool:
    """Return whether a run is not done, or diverged with ``on-divergence=stop``."""
    if not is_done(cell, out):
        return True
    diverged = DIVERGED_AT in summary_of(cell.folder(out))
    return diverged and cell.config.on_divergence == "stop"

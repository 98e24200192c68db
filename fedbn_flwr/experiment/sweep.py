"""Doing the runs of a study.

A finished run (with ``summary.json``) is skipped, an unfinished run is resumed from its last checkpoint, and the folder
of a run that cannot be resumed is renamed. Finished runs with other settings than the study's are an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from fedbn_flwr.errors import ConfigError, RunFailedError
from fedbn_flwr.experiment.config import CENTRALIZED, Config, from_older
from fedbn_flwr.experiment.output import DIVERGED_AT, PLACES, RunFolder, changed_settings, lock_folder
from fedbn_flwr.experiment.recorder import OnRound
from fedbn_flwr.experiment.run import Engine, run
from fedbn_flwr.experiment.serve import reference_config
from fedbn_flwr.experiment.study import Cell, Study, finished, summary_of
from fedbn_flwr.experiment.study_tables import write_tables

__all__ = ["sweep"]

logger = logging.getLogger("flwr")


def sweep(
    study: Study,
    out: Path,
    engine: Engine = "in-process",
    on_cell: Callable[[Cell, int, int], OnRound | None] | None = None,
) -> str:
    """Do the unfinished runs of a study, write its tables and curves, and return the Markdown table.

    Args:
        study: the grid.
        out: folder of all runs; ``table.md``, ``table.csv`` and ``curves.png`` are written there after each run, and
            ``domains.md`` and ``domains.csv`` if runs were tested by domain.
        engine: as for ``run``.
        on_cell: called before each run with the run, its index and the number of runs; it returns the ``on_round`` of
            the run.

    Raises:
        ConfigError: another process writes to the folder, or finished runs in it have other settings than the study.
        FedBNError: a run could not be done; finished runs stay, and the same call continues with the others.
        RunFailedError: runs trained nothing, or they diverged and their ``on-divergence`` is "stop". All other runs are
            finished, and the error holds the table.
    """
    cells = list(study.cells())
    for cell in (cell for cell in cells if cell.seed == study.seeds[0]):
        for key, why in cell.dropped.items():
            logger.warning("%s/%s: %s of base is left out: %s", cell.method, cell.split, key, why)
    with lock_folder(out, "study"):
        _refuse_changed(cells, out)
        for index, cell in enumerate(cells):
            folder = cell.folder(out)
            if finished(folder):
                continue
            try:
                _do(cell.config, folder, engine, on_cell(cell, index, len(cells)) if on_cell else None)
            except RunFailedError as error:  # the other runs do not depend on it
                logger.error("%s: %s", cell.name, error)
            write_tables(study, out)
        table = write_tables(study, out)
    known = {name for cell in cells if finished(cell.folder(out)) for name in summary_of(cell.folder(out))["final"]}
    if absent := [name for name in study.metrics if name not in known]:
        logger.warning("metrics: no run of this study has %s", ", ".join(absent))
    if failed := [cell.name for cell in cells if _failed(cell, out)]:
        message = f"{len(failed)} of {len(cells)} runs diverged or trained nothing: {', '.join(failed)}"
        raise RunFailedError(message, table)
    return table


def _refuse_changed(cells: Sequence[Cell], out: Path) -> None:
    """Raise ConfigError if finished runs have other settings than the study; the error names all of them."""
    done = [cell for cell in cells if finished(cell.folder(out))]
    changed = {cell.name: _changed(cell.config, cell.folder(out)) for cell in done}
    if lines := [f"{name}: {keys}" for name, keys in changed.items() if keys]:
        raise ConfigError(
            f"out={str(out)!r} has finished runs with other settings than this study:\n" + "\n".join(lines) + "\n"
            "Choose another --out, give the study its old settings, or rename the folders of these runs."
        )


def _changed(config: Config, folder: Path) -> str:
    """Return the settings of the folder's run that differ from the config, as ``changed_settings`` does."""
    now = reference_config(config) if config.strategy == CENTRALIZED else config
    free = PLACES if config.num_clients else PLACES | {"num-clients"}  # 0 follows from the other settings
    saved = Config.make({**from_older(RunFolder.settings(folder)), "resume": False})
    return changed_settings(saved.to_mapping(), now.to_mapping(), free)


def _failed(cell: Cell, out: Path) -> bool:
    """Return whether a run has no summary, or says that it diverged although ``on-divergence`` is "stop"."""
    folder, stop = cell.folder(out), cell.config.on_divergence == "stop"
    return not finished(folder) or (stop and DIVERGED_AT in summary_of(folder))


def _do(config: Config, folder: Path, engine: Engine, on_round: OnRound | None) -> None:
    """Resume a run, or do it from the start if its checkpoints do not fit the study."""
    if config.strategy != CENTRALIZED and (folder / "checkpoint").is_dir():
        try:
            if changed := _changed(config, folder):
                raise ConfigError(f"it belongs to a run with other settings: {changed}")
            run(config.model_copy(update={"resume": True}), folder, engine, on_round)
            return
        except ConfigError as error:
            logger.warning("%s starts from the beginning: %s", folder, error)
    _set_aside(folder)
    run(config, folder, engine, on_round)


def _set_aside(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        number = 1
        while (kept := folder.with_name(f"{folder.name}.unfinished-{number}")).exists():
            number += 1
        folder.rename(kept)

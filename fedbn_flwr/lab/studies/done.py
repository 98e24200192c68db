"""What became of a run of a study: finished or failed, and with the settings that the study has now or others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.config import CENTRALIZED, Config
from fedbn_flwr.lab.files import read_json
from fedbn_flwr.lab.output.folder import PLACES, RunFolder, changed_settings
from fedbn_flwr.lab.runs.centralized import reference_config
from fedbn_flwr.lab.studies.cell import Cell

__all__ = ["FAILED", "changed", "failure_of", "finished", "is_done", "of_study", "summary_of"]

FAILED = "failed.json"  # in the folder of a run that a sweep could not finish: the error


def is_done(cell: Cell, out: Path) -> bool:
    """Return whether a run is finished and its settings are those of the study."""
    return finished(cell.folder(out)) and of_study(cell, out)


def of_study(cell: Cell, out: Path) -> bool:
    """Return whether the run in a cell's folder, finished or not, has the settings that the study has now.

    Where the cell's config cannot be made, as its data are elsewhere, the run counts as the study's.
    """
    try:
        config = cell.config
    except FedBNError:
        return True
    return not changed(config, cell.folder(out))


def changed(config: Config, folder: Path) -> str:
    """Return the settings of the folder's run that differ from the config, as ``changed_settings`` does.

    A ``config.yaml`` that cannot be read differs, too; the text is then its error.
    """
    now = reference_config(config) if config.strategy == CENTRALIZED else config
    free = PLACES if config.num_clients else PLACES | {"num-clients"}  # 0 follows from the other settings
    try:
        settings = {**RunFolder.settings(folder), "resume": False}
    except FedBNError as error:
        return str(error)
    try:
        saved = Config.make(settings).to_mapping()
    except FedBNError:  # the data of that run are not here any more, or this version refuses its settings
        saved = settings
    return changed_settings(saved, now.to_mapping(), free)


def finished(folder: Path) -> bool:
    """Return whether the run of the folder is finished: its summary is written last."""
    return (folder / "summary.json").is_file()


def summary_of(folder: Path) -> dict[str, Any]:
    """Return the summary of a finished run; empty without one."""
    return read_json(folder / "summary.json")


def failure_of(cell: Cell, out: Path) -> dict[str, Any]:
    """Return the error with which the last try of a run ended; empty if there is none, or it had other settings."""
    folder = cell.folder(out)
    failure = read_json(folder / FAILED)
    begun = bool(failure) and (folder / "config.yaml").is_file()
    return {} if begun and not of_study(cell, out) else failure

"""One run of a study: its state, and its start or continuation."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import traceback
from pathlib import Path
from typing import Any

import torch

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import FedBNError, NotResumableError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.config.check_config import check_fields
from fedbn_flwr.lab.own_code import only_code_of
from fedbn_flwr.lab.results.files import read_json
from fedbn_flwr.lab.results.folder import (
    PLACES,
    RunFolder,
    changed_settings,
    lock_folder,
)
from fedbn_flwr.lab.results.result_writer import OnRound
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.studies.study import Cell

logger = logging.getLogger("flwr")

# file with the error, in the folder of a run that a sweep could not finish
FAILED = "failed.json"


def is_done(cell: Cell, out: Path) -> bool:
    """Return whether a run is finished and has the settings of the study."""
    return finished(cell.folder(out)) and of_study(cell, out)


def of_study(cell: Cell, out: Path) -> bool:
    """Return whether the run in a cell's folder has the study's current settings.

    If making the cell's config raises a FedBNError, the run counts as the study's. The
    cell's data may be elsewhere, for example.
    """
    try:
        config = cell.config
    except FedBNError:
        return True
    return not changed(config, cell.folder(out))


def changed(config: Config, folder: Path) -> str:
    """Return a text with the settings of the folder's run that differ from the config.

    The text is "" if none differs. If ``config.yaml`` cannot be read, the text is the
    error.
    """
    # With num-clients=0, the number of clients follows from the other settings.
    free = PLACES if config.num_clients else PLACES | {"num-clients"}
    try:
        settings = {**RunFolder.settings(folder), "resume": False}
    except FedBNError as error:
        return str(error)
    own = config.dataset, config.model, config.task, config.loop, config.partition
    try:
        with only_code_of(*own):
            saved = Config.make(settings).to_mapping()
    # The data of the saved run may be gone, or this version refuses its settings.
    # Compare the settings that it knows.
    except FedBNError:
        known, _ = check_fields(Config, settings, complete=False)
        saved = {**settings, **known.to_mapping()}
    return changed_settings(saved, config.to_mapping(), free)


def finished(folder: Path) -> bool:
    """Return whether the folder's run is finished, as its summary is written last."""
    return (folder / "summary.json").is_file()


def summary_of(folder: Path) -> dict[str, Any]:
    """Return the summary of a finished run, or {} without one."""
    return read_json(folder / "summary.json")


def failure_of(cell: Cell, out: Path) -> dict[str, Any]:
    """Return the error that ended the last try of a run, or {} without an error."""
    return read_json(cell.folder(out) / FAILED)


def do_cell(
    cell: Cell, out: Path, on_round: OnRound | None = None, workers: int | None = None
) -> str:
    """Do or continue a run of a study, and return its error or "".

    If the study allows divergence, a diverged run has no error. An exception of the run
    is not raised, because the other runs continue. It is written to ``failed.json`` in
    the run's folder. The checkpoints of a finished run are removed.
    """
    folder = cell.folder(out)
    threads = torch.get_num_threads()
    # Use the run's number of threads for the server's tests as well, so that the bits
    # do not depend on the machine.
    torch.set_num_threads(cell.config.torch_threads)
    try:
        _do(cell.config, folder, on_round, workers)
    except Exception as error:  # the other runs continue after any error
        kind = type(error).__name__
        if not finished(folder):
            note_failure(folder, str(error), kind, traceback.format_exc())
        return str(error) or kind
    finally:
        torch.set_num_threads(threads)
    (folder / FAILED).unlink(missing_ok=True)
    # A finished run is never resumed, and its model and tests are beside the
    # checkpoints.
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    return ""


def note_failure(folder: Path, error: str, kind: str, trace: str = "") -> None:
    """Write the error that ended a run to ``failed.json``."""
    content = {"error": error, "type": kind, "traceback": trace}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FAILED, json.dumps(content, indent=2) + "\n")
    except OSError as problem:  # for example a full disk
        logger.warning("%s cannot be written: %s", folder / FAILED, problem)


def _do(
    config: Config, folder: Path, on_round: OnRound | None, workers: int | None
) -> None:
    """Resume a run, or do it from the start if its checkpoints do not fit the study."""
    # Rename a finished run with other settings, because a sweep deletes nothing.
    if folder.is_dir():
        # If another process still writes there, the lock raises an error before
        # anything is renamed.
        with lock_folder(folder):
            if finished(folder):  # finished with other settings, see ``sweep``
                _set_aside(folder, "earlier")
            (folder / FAILED).unlink(missing_ok=True)  # the error of a former try
    if (folder / "checkpoint").is_dir():
        try:
            settings = changed(config, folder)
            if settings:
                raise NotResumableError(
                    f"it belongs to a run with other settings: {settings}"
                )
            resumed = config.model_copy(update={"resume": True})
            run(resumed, folder, on_round=on_round, workers=workers)
            return
        except NotResumableError as error:
            logger.warning("%s starts from the beginning: %s", folder, error)
    # Rename the folder of a run without a usable checkpoint, and start the run again.
    _set_aside(folder, "unfinished")
    run(config, folder, on_round=on_round, workers=workers)


def _set_aside(folder: Path, why: str) -> None:
    """Rename a folder to FOLDER.WHY-N, unless it is absent or empty."""
    if folder.exists() and any(folder.iterdir()):
        for number in itertools.count(1):
            kept = folder.with_name(f"{folder.name}.{why}-{number}")
            if not kept.exists():
                folder.rename(kept)
                return

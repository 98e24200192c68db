"""Doing one run of a study: from the start, or on from its last checkpoint."""

from __future__ import annotations

import json
import logging
import traceback
from pathlib import Path

import torch

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import NotResumableError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.output.folder import lock_folder
from fedbn_flwr.lab.output.recorder import OnRound
from fedbn_flwr.lab.runs.run import Engine, run
from fedbn_flwr.lab.studies.cell import Cell
from fedbn_flwr.lab.studies.done import FAILED, changed, finished

__all__ = ["do_cell", "note_failure"]

logger = logging.getLogger("flwr")


def do_cell(cell: Cell, out: Path, engine: Engine, on_round: OnRound | None = None, workers: int | None = None) -> str:
    """Do or continue a run of a study; return its error, "" if it is finished or diverged as the study allows.

    An exception is written to ``failed.json`` in its folder: other runs do not depend on it.
    """
    folder, threads = cell.folder(out), torch.get_num_threads()
    torch.set_num_threads(cell.config.torch_threads)  # of the server's tests, too: the same bits on any machine
    try:
        _do(cell.config, folder, engine, on_round, workers)
    except Exception as error:  # whatever it is, the other runs go on
        if not finished(folder):
            note_failure(folder, str(error), type(error).__name__, traceback.format_exc())
        return str(error) or type(error).__name__
    finally:
        torch.set_num_threads(threads)
    (folder / FAILED).unlink(missing_ok=True)
    return ""


def note_failure(folder: Path, error: str, kind: str, trace: str = "") -> None:
    """Write the error with which a run ended."""
    content = {"error": error, "type": kind, "traceback": trace}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FAILED, json.dumps(content, indent=2) + "\n")
    except OSError as problem:  # for example a full disk
        logger.warning("%s cannot be written: %s", folder / FAILED, problem)


def _do(config: Config, folder: Path, engine: Engine, on_round: OnRound | None, workers: int | None) -> None:
    """Resume a run, or do it from the start if its checkpoints do not fit the study."""
    if folder.is_dir():
        with lock_folder(folder):  # an error if another process still writes there: nothing is renamed under it
            if finished(folder):  # with other settings, see ``_do_all``
                _set_aside(folder, "earlier")
            (folder / FAILED).unlink(missing_ok=True)  # of a former try
    if (folder / "checkpoint").is_dir():
        try:
            if settings := changed(config, folder):
                raise NotResumableError(f"it belongs to a run with other settings: {settings}")
            run(config.model_copy(update={"resume": True}), folder, engine, on_round, workers)
            return
        except NotResumableError as error:
            logger.warning("%s starts from the beginning: %s", folder, error)
    _set_aside(folder, "unfinished")
    run(config, folder, engine, on_round, workers)


def _set_aside(folder: Path, why: str) -> None:
    """Rename a folder that is not empty to FOLDER.WHY-N."""
    if folder.exists() and any(folder.iterdir()):
        number = 1
        while (kept := folder.with_name(f"{folder.name}.{why}-{number}")).exists():
            number += 1
        folder.rename(kept)

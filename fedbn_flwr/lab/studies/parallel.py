"""The runs of a study in parallel, each in a process on ``torch-threads`` cores."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from fedbn_flwr.engines.worker_process import end_with_the_command
from fedbn_flwr.lab.results.folder import DIVERGED_AT
from fedbn_flwr.lab.studies.one_run import (
    do_cell,
    failure_of,
    finished,
    note_failure,
    summary_of,
)
from fedbn_flwr.lab.studies.study import Cell
from fedbn_flwr.lab.studies.sweep import Follower, Outcome, Runner
from fedbn_flwr.machine import keep_freed_memory

logger = logging.getLogger("flwr")


def in_parallel(parallel: int) -> Runner:
    """Return a runner that does ``parallel`` runs at a time. They share GPUs evenly."""

    def runner(
        cells: Sequence[Cell], out: Path, follower: Follower
    ) -> Generator[Outcome]:
        waiting, running = _processes(cells, out), dict[Any, tuple[Cell, Any]]()
        try:
            while True:
                for cell, process in waiting:
                    process.start()
                    running[process.sentinel] = cell, process
                    follower.begin(cell)
                    if len(running) == parallel:
                        break
                if not running:
                    return
                for ended in wait([*running]):
                    cell, process = running.pop(ended)
                    process.join()
                    yield cell, _error_of(cell, out, process.exitcode)
        # End the processes even if the sweep fails or wants no more runs.
        finally:
            for _, process in running.values():
                process.terminate()
                process.join()

    return runner


def _processes(cells: Sequence[Cell], out: Path) -> Iterator[tuple[Cell, Any]]:
    """Yield each run with its process, which is not started yet."""
    # Start new processes instead of forks, because CUDA and torch's threads do not
    # survive a fork. Pass a copy of the cell without its cached config.
    spawn = multiprocessing.get_context("spawn")
    for number, cell in enumerate(cells):
        yield cell, spawn.Process(target=_work, args=(replace(cell), out, number))


def _error_of(cell: Cell, out: Path, exit_status: int) -> str:
    """Return the error of a run that ended in another process, or ""."""
    folder = cell.folder(out)
    if not finished(folder):
        # A process that was killed, such as for lack of memory, has noted no error.
        if not failure_of(cell, out):
            error = f"its process ended with status {exit_status}"
            note_failure(folder, error, "ProcessEnded")
        return str(failure_of(cell, out)["error"])
    diverged = summary_of(folder).get(DIVERGED_AT)
    stops = diverged and cell.config.on_divergence == "stop"
    return f"diverged in round {diverged}" if stops else ""


def _work(cell: Cell, out: Path, number: int) -> None:
    """Do a run in a process."""
    # Ctrl-C reaches all processes of the terminal, but the sweep ends its processes
    # itself. Also end this process if the sweep is killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_the_command, daemon=True).start()
    keep_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    # Several processes write to the terminal, so each warning names its run.
    logger.setLevel(logging.WARNING)
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter(f"{cell.name}: %(message)s"))
    do_cell(cell, out, workers=0)

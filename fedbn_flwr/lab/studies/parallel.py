"""The runs of a study in parallel, each in a process on ``torch-threads`` cores."""

from __future__ import annotations

import logging
import multiprocessing
import queue
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from logging.handlers import QueueHandler
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from fedbn_flwr.engines.worker_process import end_with_the_command
from fedbn_flwr.lab.setup import refuse_named_gpu
from fedbn_flwr.lab.studies.one_run import do_cell, finished, note_failure
from fedbn_flwr.lab.studies.study import Cell
from fedbn_flwr.lab.studies.sweep import Follower, Outcome, Runner
from fedbn_flwr.machine import keep_freed_memory

logger = logging.getLogger("flwr")


@dataclass(frozen=True)
class _Running:
    """A run in progress, its process, and its place among the parallel runs."""

    cell: Cell
    process: Any
    place: int


def in_parallel(parallel: int) -> Runner:
    """Return a runner that does ``parallel`` runs at a time. They share GPUs evenly."""
    # Start new processes instead of forks, because CUDA and torch's threads do not
    # survive a fork.
    spawn = multiprocessing.get_context("spawn")

    def runner(
        cells: Sequence[Cell], out: Path, follower: Follower
    ) -> Generator[Outcome]:
        for cell in cells:
            refuse_named_gpu(cell.config)
        waiting, free = deque(cells), [*range(parallel)]
        running: dict[Any, _Running] = {}  # by the pipe of its process
        warned: set[str] = set()
        try:
            while waiting or running:
                # Fill the free places.
                while waiting and free:
                    cell, place = waiting.popleft(), free.pop()
                    receiver, sender = spawn.Pipe(duplex=False)
                    # Pass a copy of the cell without its cached config.
                    args = (sender, replace(cell), out, place)
                    process = spawn.Process(target=_work, args=args)
                    # The process must ignore Ctrl-C, because Ctrl-C reaches all
                    # processes of the terminal, but the sweep ends its processes
                    # itself.
                    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
                    process.start()
                    signal.signal(signal.SIGINT, handler)
                    # Close this copy of the sending end, so that the pipe closes if the
                    # process ends.
                    sender.close()
                    running[receiver] = _Running(cell, process, place)
                    follower.begin(cell)

                # Wait for a process that answers or ends.
                for answered in wait([*running]):
                    ended = running.pop(answered)
                    folder = ended.cell.folder(out)
                    error, warnings = _outcome(answered, ended.process, folder)
                    free.append(ended.place)
                    for warning in warnings:
                        # Log equal warnings once, because runs of a study often have
                        # the same warning.
                        if warning not in warned:
                            logger.warning("%s: %s", ended.cell.name, warning)
                            warned.add(warning)
                    yield ended.cell, error
        # End the processes even if the sweep fails or wants no more runs.
        finally:
            for left in running.values():
                left.process.terminate()
                left.process.join()

    return runner


def _outcome(receiver: Any, process: Any, folder: Path) -> tuple[str, list[str]]:
    """Return the error and the warnings of a run in another process.

    The process has sent its answer, or it ended without an answer.
    """
    try:
        error, warnings = receiver.recv()
    except EOFError:  # it was killed, such as for lack of memory
        process.join()
        error, warnings = f"its process ended with status {process.exitcode}", []
        if not finished(folder):
            note_failure(folder, error, "ProcessEnded")
    process.join()
    return error, warnings


def _work(sender: Any, cell: Cell, out: Path, place: int) -> None:
    """Do a run in a process, and send its error and its warnings."""
    # End this process if the sweep is killed.
    threading.Thread(target=end_with_the_command, daemon=True).start()
    keep_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.set_device(place % torch.cuda.device_count())
    # Collect the warnings instead of printing them, because the warnings of several
    # runs would mix on the terminal.
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger.setLevel(logging.WARNING)
    logger.handlers = [QueueHandler(records)]
    error = do_cell(cell, out, workers=0)
    sender.send((error, [records.get().getMessage() for _ in range(records.qsize())]))

"""The runs of a study in parallel, each in a process of its own on ``torch-threads``
cores.
"""

from __future__ import annotations

import logging
import multiprocessing
import queue
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from logging.handlers import QueueHandler
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from fedbn_flwr.engines.worker_process import end_with_the_command
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.runs.run import work_of
from fedbn_flwr.lab.setup import make_model, pick_device, refuse_named_gpu
from fedbn_flwr.lab.studies.one_run import do_cell, finished, note_failure
from fedbn_flwr.lab.studies.study import Cell
from fedbn_flwr.lab.studies.sweep import Follower, Outcome, Runner
from fedbn_flwr.machine import keep_freed_memory, memory_bytes, num_cores
from fedbn_flwr.training.settings import share_of

__all__ = ["default_parallel", "in_parallel"]

logger = logging.getLogger("flwr")

# bytes of a process that has imported torch and Flower, measured
_PROCESS = 0.8 * 2**30
# examples times parameters; below, the runs are done before the processes have started
_WORTH_PROCESSES = 1e10


def default_parallel(cells: Sequence[Cell]) -> int:
    """Return how many runs at a time pay on this machine: one for each core, or GPU, as
    far as memory allows.

    A small study is done one run after another.
    """
    if (
        not cells
        or sum(work_of(cell.config, make_model(cell.config)) for cell in cells)
        < _WORTH_PROCESSES
    ):
        return 1
    places = num_cores() // max(cell.config.torch_threads for cell in cells)
    if any(pick_device(cell.config.device).type == "cuda" for cell in cells):
        places = torch.cuda.device_count()
    memory = 0.6 * memory_bytes() / max(_memory_need(cell.config) for cell in cells)
    return max(1, min(len(cells), places, int(memory)))


def _memory_need(config: Config) -> float:
    """Return an estimate of a run's memory in bytes: the process, the data twice, and
    the models of a round.
    """
    clients = count_clients(config)
    data = partitioned_data(config, clients).dataset
    held = sum(part.inputs.nbytes for part in (data.train, data.test) if part.in_memory)
    model = sum(value.nbytes for value in make_model(config).state_dict().values())
    models = 2 * share_of(config.fraction_train, clients) + 8
    return _PROCESS + 2 * held + float(models * model)


def in_parallel(parallel: int) -> Runner:
    """Return a runner that does so many runs at a time; runs share the GPUs evenly."""
    spawn = multiprocessing.get_context("spawn")

    def runner(
        cells: Sequence[Cell], out: Path, follower: Follower
    ) -> Generator[Outcome]:
        for cell in cells:
            refuse_named_gpu(cell.config)
        waiting, free = deque(cells), [*range(parallel)]
        running: dict[Any, tuple[Cell, Any, int]] = {}  # by the pipe of its process
        warned: set[str] = set()
        try:
            while waiting or running:
                while waiting and free:
                    cell, place = waiting.popleft(), free.pop()
                    receiver, sender = spawn.Pipe(duplex=False)
                    plain = replace(cell)  # without the config that it has computed
                    process = spawn.Process(
                        target=_work, args=(sender, plain, out, place)
                    )
                    # Ctrl-C is of the whole terminal; the sweep ends its processes.
                    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
                    process.start()
                    signal.signal(signal.SIGINT, handler)
                    sender.close()  # so that the end of the process ends the pipe
                    running[receiver] = cell, process, place
                    follower.begin(cell)
                for answered in wait([*running]):
                    cell, process, place = running.pop(answered)
                    error, warnings = _outcome(answered, process, cell.folder(out))
                    free.append(place)
                    for warning in warnings:
                        # several runs of a study often have the same
                        if warning not in warned:
                            logger.warning("%s: %s", cell.name, warning)
                            warned.add(warning)
                    yield cell, error
        finally:
            for _, process, _ in running.values():
                process.terminate()
                process.join()

    return runner


def _outcome(receiver: Any, process: Any, folder: Path) -> tuple[str, list[str]]:
    """Return the error of a run whose process has answered or ended, and its warnings."""
    try:
        error, warnings = receiver.recv()
    except EOFError:  # it was killed, for example for lack of memory
        process.join()
        error, warnings = f"its process ended with status {process.exitcode}", []
        if not finished(folder):
            note_failure(folder, error, "ProcessEnded")
    process.join()
    return error, warnings


def _work(sender: Any, cell: Cell, out: Path, place: int) -> None:
    """Do a run in a process; send its error and what it logged as warnings."""
    threading.Thread(target=end_with_the_command, daemon=True).start()
    keep_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.set_device(place % torch.cuda.device_count())
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger.setLevel(logging.WARNING)
    logger.handlers = [QueueHandler(records)]
    error = do_cell(cell, out, workers=0)
    sender.send((error, [records.get().getMessage() for _ in range(records.qsize())]))

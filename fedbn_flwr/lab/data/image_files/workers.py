"""Worker processes that decode batches of images ahead of their use."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

import torch

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.image_files.decoding import Bytes
from fedbn_flwr.machine import begin_fork, forking, num_cores

if TYPE_CHECKING:
    from fedbn_flwr.lab.data.image_files.file_set import FileSet

__all__ = ["Batch", "Request", "WorkerPool"]

Request = tuple[Sequence[int], Sequence[str], Sequence[int]]
"""The arguments of ``FileSet.read``."""

Batch = tuple[Bytes, Bytes | None]
"""What ``FileSet.read`` returns: images, and classes of pixels."""

_READ_AHEAD = 3  # batches for each worker process that are asked for before the first one is used
_MOST_AHEAD = 512 * 2**20  # bytes of decoded images that are asked for and not used yet


class WorkerPool:
    """The worker processes of one file set; they start when they are needed, and end with the files.

    Args:
        asked: number of processes, see ``Shape.workers``.
    """

    def __init__(self, asked: int) -> None:
        self._asked = asked
        self._lock = threading.Lock()
        self._started: tuple[int, ProcessPoolExecutor] | None = None  # with the process that they belong to

    def read(self, files: FileSet, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield ``files.read`` of each request, in order; the workers read some requests ahead.

        Raises:
            DataError: a file is damaged, or a worker process has ended.
        """
        count = _num_workers(self._asked)
        if not count:
            yield from (files.read(*request) for request in requests)
            return
        waiting: deque[Future[Batch]] = deque()
        try:
            for request in requests:
                waiting.append(self._executor(files).submit(_read, *request))
                size = max(1, len(request[0])) * files.image_bytes
                if len(waiting) > min(count * _READ_AHEAD, max(1, _MOST_AHEAD // size)):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            with self._lock:
                self._started = None
            raise DataError(
                "a process that decodes images has ended, perhaps for want of memory. Use fewer data-workers, a "
                "smaller cache-gib, or data-workers=0."
            ) from error
        finally:
            for future in waiting:
                future.cancel()

    def _executor(self, files: FileSet) -> ProcessPoolExecutor:
        with self._lock:
            if self._started is None or self._started[0] != os.getpid():  # a fork has none of its own
                executor = _start(files, _num_workers(self._asked))
                self._started = os.getpid(), executor
                weakref.finalize(files, executor.shutdown, wait=False)
            return self._started[1]


def _num_workers(asked: int) -> int:
    """Return the number of processes that decode: for -1 the cores, or none where several processes have clients."""
    if asked >= 0:
        return asked
    ray = sys.modules.get("ray")
    shared = multiprocessing.parent_process() is not None or (ray is not None and ray.is_initialized())
    return 0 if shared else num_cores()


def _start(files: FileSet, workers: int) -> ProcessPoolExecutor:
    """Return worker processes that are forks of this one."""
    files.cache  # noqa: B018  # created before the fork, so that all processes share it
    with forking():
        # The pool ends with the files: it must not be what keeps them.
        arguments = weakref.ref(files), os.getpid()
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _open_set, arguments)
        pool.submit(int).result()  # starts all processes
    return pool


_of_this_worker: list[Any] = []  # in a worker process its files


def _read(numbers: Sequence[int], each: Sequence[str], seeds: Sequence[int]) -> Batch:
    """Do ``FileSet.read`` with the worker's files."""
    batch: Batch = _of_this_worker[-1].read(numbers, each, seeds)
    return batch


def _open_set(files: weakref.ref[FileSet], parent: int) -> None:
    """Prepare a worker for one set of files; the process ends when its parent has ended, however that came about."""
    begin_fork()
    _of_this_worker.append(files())
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()

"""Worker processes that decode batches of images ahead of their use."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

import torch

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.image_files.decoding import Bytes
from fedbn_flwr.machine import num_cores

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
        self._started: tuple[int, Executor] | None = None  # with the process that they belong to

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

    def _executor(self, files: FileSet) -> Executor:
        with self._lock:
            if self._started is None or self._started[0] != os.getpid():  # a fork has none of its own
                files.cache()  # created before the workers are forked, so that they share it
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
    if shared:
        return 0
    return num_cores()


def _start(files: FileSet, workers: int) -> Executor:
    """Return worker processes that are forks of this one, which share the cache; threads where there are no forks."""
    if sys.platform == "win32":
        return ThreadPoolExecutor(workers, initializer=_open_set, initargs=(weakref.ref(files), 0))
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the processes only decode
        # The pool ends with the files: it must not be what keeps them.
        pool = ProcessPoolExecutor(workers, context, _open_set, (weakref.ref(files), os.getpid()))
        pool.submit(int).result()  # starts all processes
    return pool


_of_this_worker = threading.local()


def _read(numbers: Sequence[int], each: Sequence[str], seeds: Sequence[int]) -> Batch:
    """Do ``FileSet.read`` with the worker's files."""
    found: Batch = _of_this_worker.files.read(numbers, each, seeds)
    return found


def _open_set(files: weakref.ref[FileSet], parent: int) -> None:
    """Prepare a worker for one set of files; a process ends when its parent has ended, however that came about."""
    _of_this_worker.files = files()
    if not parent:
        return
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()

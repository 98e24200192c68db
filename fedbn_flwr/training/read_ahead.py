"""Batches of a data set, which the workers of its ``DataLoader`` read in advance.

The random transforms of a batch draw from a seed of their own. Therefore a batch does
not depend on the process that reads it, or on the batches before it.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, tee
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import signal_handling

from fedbn_flwr.errors import DataError
from fedbn_flwr.machine import begin_fork, forking, not_for_forks, threads
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.reading import Read, draws_nothing, name_of
from fedbn_flwr.training.run_memory import first_time

logger = logging.getLogger("flwr")

_OPTIONS = (
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
)

Task = tuple[list[int], int]
"""The numbers of a batch's examples, and the seed of its random transforms."""


def read_ahead(
    read: Read,
    order: Iterable[list[int]],
    generator: torch.Generator | None,
    loader: Any,
    data: Any,
) -> Iterator[tuple[list[int], Any]]:
    """Yield each list of numbers with the batch of these examples.

    Args:
        read: reads a batch.
        order: the numbers of each batch. Workers take some in advance. For an empty
            batch, example 0 is read.
        generator: gives each batch a seed. If it is None, the seeds depend on the seed
            of torch's default generator.
        loader: its workers read. Rows of tensors are read by this process, because an
            index is faster than sending them.
        data: the data set that a user's function finds in ``get_worker_info()``.

    Raises:
        DataError: the workers cannot start, or one dies or needs longer than the
            ``timeout`` of the loader.
    """
    if draws_nothing(read):
        for chosen in order:
            yield chosen, read(chosen or [0])
        return
    reading = _Reading(read)
    seeds = _seeds(generator)
    tasks: Iterator[Task] = ((chosen, next(seeds)) for chosen in order)
    # A daemon cannot start processes. A user's own loader may have no workers.
    workers = getattr(loader, "num_workers", 0)
    if workers and not multiprocessing.current_process().daemon:
        # For a single batch, processes would start in vain.
        first = list(islice(tasks, 2))
        tasks = chain(first, tasks)
        why_not = not_for_forks(read)
        if why_not and first_time(why_not):
            logger.warning("num_workers=%d is ignored, because %s.", workers, why_not)
        if len(first) > 1 and not why_not:
            yield from _from_workers(reading, tasks, loader, data, first[0][1])
    for task in tasks:
        yield task[0], reading.batch(task)


def _seeds(generator: torch.Generator | None) -> Iterator[int]:
    # Draw nothing from the default generator, because the model draws from it.
    source = generator or torch.Generator().manual_seed(torch.initial_seed())
    while True:
        yield int(torch.randint(2**63 - 1, (), generator=source, device="cpu"))


class _Reading(Dataset[Any]):
    """A data set whose indices are tasks and whose examples are batches."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def batch(self, task: Task) -> Any:
        """Return the batch of a task."""
        chosen, seed = task
        # Users' transforms draw from the default generators of torch, NumPy, Python. A
        # worker has one thread, and the last bits of a sum depend on this number.
        with seeded(seed), threads(1):
            return self._read(chosen or [0])

    def __getitem__(self, task: Task) -> list[Any]:
        """Return a list with the batch. If reading fails, the list is empty."""
        try:
            return [self.batch(task)]
        # The main process reads again, and raises the true error.
        except (Exception, SystemExit):
            return []


def _from_workers(
    reading: _Reading, tasks: Iterable[Task], loader: Any, data: Any, seed: int
) -> Iterator[tuple[list[int], Any]]:
    # Copy the tasks, because the workers take some before the first answer.
    ahead, tasks = tee(tasks)
    workers: Any = DataLoader(
        reading,
        batch_size=None,
        sampler=ahead,
        collate_fn=_unchanged,
        worker_init_fn=functools.partial(_begin, loader.worker_init_fn, data),
        generator=torch.Generator().manual_seed(seed),  # the workers get seeds from it
        **{name: getattr(loader, name) for name in _OPTIONS},
    )
    name = name_of(data)
    try:
        with forking():
            answers: Any = iter(workers)
    except Exception as error:  # pickle runs the user's code
        raise DataError(
            f"the workers of the DataLoader of {name} cannot start"
            f" ({type(error).__name__}: {error}). Unless workers are started by fork,"
            " the data set and the loader's collate_fn and worker_init_fn must be"
            " picklable: define them in a module. Otherwise, use num_workers=0."
        ) from error
    # From here on, ``_next`` watches the workers.
    signal_handling._remove_worker_pids(id(answers))  # type: ignore[attr-defined,unused-ignore]
    answers._worker_pids_set = False
    try:
        for task in tasks:
            answer = _next(answers, name)
            yield task[0], answer[0] if answer else reading.batch(task)
    finally:
        answers._shutdown_workers()


def _next(answers: Any, name: str) -> Any:
    """Return the next answer of the workers."""
    # Torch raises the death of a worker in the main thread at any time. Watch only
    # during the wait, because an error elsewhere would break a step or the server.
    watches = threading.current_thread() is threading.main_thread()
    if watches:
        pids = tuple(worker.pid for worker in answers._workers)
        signal_handling._set_worker_pids(id(answers), pids)  # type: ignore[attr-defined,unused-ignore]
    try:
        signal_handling._error_if_any_worker_fails()  # type: ignore[attr-defined,unused-ignore]
        return next(answers)
    except (RuntimeError, OSError, EOFError) as error:
        raise DataError(
            f"the workers of the DataLoader of {name} returned no batch ({error})."
            " Code of the data set may have ended the process, or the machine may lack"
            " memory or shared memory (/dev/shm). Give the DataLoader fewer workers, a"
            " smaller prefetch_factor, or num_workers=0."
        ) from error
    finally:
        if watches:
            signal_handling._remove_worker_pids(id(answers))  # type: ignore[attr-defined,unused-ignore]


def _begin(init: Callable[[int], None] | None, data: Any, worker: int) -> None:
    begin_fork()
    # A user's function expects its data set in ``get_worker_info()``, but torch has
    # stored the ``_Reading``. Bypass ``__setattr__``, because the object refuses changes.
    object.__setattr__(get_worker_info(), "dataset", data)
    if init is not None:
        init(worker)


def _unchanged(batch: Any) -> Any:
    return batch

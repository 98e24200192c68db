"""Batches of a data set, which the workers of its ``DataLoader`` read in advance.

The random transforms of a batch draw from a seed of their own. Therefore a batch does
not depend on the process that reads it, or on the batches before it.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from fedbn_flwr.machine import begin_fork, forking, not_for_forks, threads
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.reading import Read, draws_nothing
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
    order: Sequence[list[int]],
    generator: torch.Generator | None,
    loader: Any,
    data: Any,
) -> Generator[Any, None, None]:
    """Yield the batch of each list of numbers.

    Args:
        read: reads a batch.
        order: the numbers of each batch. Workers read some in advance.
        generator: gives each batch a seed. If it is None, the seeds depend on the seed
            of torch's default generator.
        loader: its workers read. Rows of tensors are read by this process, because an
            index is faster than sending them.
        data: the data set that a user's function finds in ``get_worker_info()``.
    """
    if draws_nothing(read):
        yield from map(read, order)
        return
    # Draw nothing from the default generator, because the model draws from it.
    source = generator or torch.Generator().manual_seed(torch.initial_seed())
    tasks: list[Task] = []
    for chosen in order:
        seed = torch.randint(2**63 - 1, (), generator=source, device="cpu")
        tasks.append((chosen, int(seed)))
    reading = _Reading(read)
    # A daemon cannot start processes. A user's own loader may have no workers. For a
    # single batch, processes would start in vain.
    workers = getattr(loader, "num_workers", 0)
    if workers and len(tasks) > 1 and not multiprocessing.current_process().daemon:
        why_not = not_for_forks(read)
        if not why_not:
            yield from _from_workers(reading, tasks, loader, data)
            return
        if first_time(why_not):
            logger.warning("num_workers=%d is ignored, because %s.", workers, why_not)
    for task in tasks:
        yield reading[task]


class _Reading(Dataset[Any]):
    """A data set whose indices are tasks and whose examples are batches."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __getitem__(self, task: Task) -> Any:
        """Return the batch of a task."""
        chosen, seed = task
        # Users' transforms draw from the default generators of torch, NumPy, Python. A
        # worker has one thread, and the last bits of a sum depend on this number.
        with seeded(seed), threads(1):
            return self._read(chosen)


def _from_workers(
    reading: _Reading, tasks: list[Task], loader: Any, data: Any
) -> Iterator[Any]:
    workers: Any = DataLoader(
        reading,
        batch_size=None,
        sampler=tasks,
        collate_fn=_unchanged,
        worker_init_fn=functools.partial(_begin, loader.worker_init_fn, data),
        # The workers get seeds from it.
        generator=torch.Generator().manual_seed(tasks[0][1]),
        **{name: getattr(loader, name) for name in _OPTIONS},
    )
    with forking():
        batches: Any = iter(workers)
    try:
        yield from batches
    finally:
        # The traceback of an exception may keep the batches, and so their workers.
        batches._shutdown_workers()


def _begin(init: Callable[[int], None] | None, data: Any, worker: int) -> None:
    begin_fork()
    # A user's function expects its data set in ``get_worker_info()``, but torch has
    # stored the ``_Reading``. Bypass ``__setattr__``, because the object refuses changes.
    object.__setattr__(get_worker_info(), "dataset", data)
    if init is not None:
        init(worker)


def _unchanged(batch: Any) -> Any:
    return batch

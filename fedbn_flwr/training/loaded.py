"""Torch data sets as the ``Batches`` of training and evaluation.

The source is a torch ``Dataset``, or the data set of a ``DataLoader``. The examples of
a batch are taken by one index from tensors, read by one call of ``__getitems__``, or
read one by one. The workers of the loader may read batches in advance: the random
transforms of a batch draw from a seed of their own, so a batch does not depend on the
process that reads it, or on the batches before it.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from fedbn_flwr.errors import DataError
from fedbn_flwr.machine import begin_fork, forking, not_for_forks, threads
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.run_memory import first_time

logger = logging.getLogger("flwr")

_OPTIONS = (
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
)

SeededBatch = tuple[list[int], int]
"""The numbers of a batch's examples, and the seed of its random transforms."""
Read = Callable[[Sequence[int]], Any]
"""Returns the batch of the examples with the given numbers."""


class LoadedBatches:
    """The data set of a ``DataLoader`` as ``Batches``.

    Args:
        loader: the ``DataLoader``.
        plain: the same examples in the same order without random transforms. They are
            read if no generator is given. None means the data set of the loader.

    If the loader has a ``SubsetRandomSampler`` or a ``DistributedSampler``, the data
    are the examples chosen by the sampler, in the order of the data set.

    Attributes:
        batch_size: the batch size of the loader or of its batch sampler. If neither has
            a batch size, it is the number of examples.

    Raises:
        DataError: a data set has no length or no indices, ``plain`` has another length,
            or the sampler does not choose examples by a fixed list.
    """

    def __init__(self, loader: Any, plain: Any = None) -> None:
        self._data = loader.dataset
        plain = self._data if plain is None else plain
        for data in (self._data, plain):
            is_map = hasattr(data, "__len__") and hasattr(data, "__getitem__")
            if isinstance(data, IterableDataset) or not is_map:
                raise DataError(
                    f"the data set, {type(data).__name__}, has no length or no indices."
                    " A pass in a fixed order needs both: use a torch Dataset, not an"
                    " IterableDataset or a DataLoader."
                )
        if len(plain) != len(self._data):
            raise DataError(
                f"the data set without random transforms has {len(plain)} examples, but"
                f" the training data set has {len(self._data)}. Both must contain the"
                " same examples in the same order."
            )
        self._plain = plain
        chosen = _chosen(loader)
        if chosen is not None:
            self._data, plain = Subset(self._data, chosen), Subset(plain, chosen)
        self._loader = loader
        self._read = reader(self._data, loader.collate_fn)
        self._read_plain = reader(plain, loader.collate_fn)
        self.batch_size: int = first_batch(loader) or len(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Any, Tensor]:
        """Return a batch, see ``training.batches.Batches``.

        If a generator is given, it gives the seed of random transforms.

        Raises:
            DataError: the examples are not pairs, they cannot be stacked, or the batch
                has another number of examples.
        """
        [batch] = self.batches([positions], generator)
        return batch

    def batches(
        self, positions: Iterable[Tensor], generator: torch.Generator | None = None
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield ``batch`` of each of the positions.

        The workers of the loader read in advance. The bits do not depend on their
        number if the data set draws only from the default generators.

        Raises:
            DataError: as in ``batch``.
        """
        read, data = self._read, self._loader.dataset
        if generator is None:
            read, data = self._read_plain, self._plain
        order = [each.tolist() for each in positions]
        batches = read_ahead(read, order, generator, self._loader, data)
        # Close the batches here, because they may have workers.
        with closing(batches):
            for chosen, batch in zip(order, batches, strict=True):
                if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                    raise _no_pair(self._data, batch)
                inputs, targets = batch
                counted = isinstance(targets, Tensor)
                if counted and targets.shape[:1] != (len(chosen),):
                    raise DataError(
                        f"{name_of(self._data)}: a batch has targets of shape"
                        f" {tuple(targets.shape)} for {len(chosen)} examples. The"
                        " collate_fn and __getitems__ must keep all examples, in their"
                        " order. To drop examples, remove them from the data set. With an"
                        " OwnTask, put concatenated targets into a tuple."
                    )
                yield inputs, targets


def _no_pair(data: Any, batch: Any) -> DataError:
    """Return the error about a batch of a data set that is not a pair."""
    parts = ""
    if isinstance(batch, Mapping):
        parts = f" of {', '.join(map(str, batch))}"
    elif isinstance(batch, (tuple, list)):
        parts = f" of length {len(batch)}"
    return DataError(
        f"a batch of {name_of(data)} is a {type(batch).__name__}{parts}, but it must be a"
        " pair (inputs, targets); the inputs may have several parts. Return pairs"
        " from a data set that wraps this data set, or from the collate_fn of a loader"
        " (in a TorchClient: fedbn_flwr.training.batches_of(loader))."
    )


def batches_of(loader: Any, plain: Dataset[Any] | None = None) -> Batches:
    """Return the data set of a ``DataLoader`` as ``Batches``.

    The batches are assembled by its ``collate_fn``. The workers of the loader
    (``num_workers``) read in advance. The bits do not depend on their number if the
    data set draws only from the default generators of torch, NumPy and Python. A single
    batch is read without workers.

    Args:
        loader: its batch size and order are ignored, because the client's settings
            define them. If its sampler chooses examples, only these are the data.
        plain: the same examples in the same order without random transforms. None means
            the data set of the loader.

    Raises:
        DataError: as in ``LoadedBatches``.
    """
    return LoadedBatches(loader, plain)


def num_examples(loader: Any) -> int:
    """Return the number of examples in an epoch of a loader.

    Raises:
        DataError: the data set has no length, or the sampler does not choose examples
            by a fixed list.
    """
    chosen = _chosen(loader)
    if chosen is not None:
        return len(chosen)
    if not hasattr(loader.dataset, "__len__"):
        raise DataError(
            f"the data set, {type(loader.dataset).__name__}, has no length. Give it a"
            " method __len__."
        )
    return len(loader.dataset)


def first_batch(loader: Any) -> int | None:
    """Return the batch size of a loader or its batch sampler, or None without one."""
    # with a user's batch sampler, the batch size of torch's loader is None
    if loader.batch_size:
        return int(loader.batch_size)
    sampler = getattr(loader, "batch_sampler", None)
    return getattr(sampler, "batch_size", None)


def _chosen(loader: Any) -> list[int] | None:
    """Return the ascending positions chosen by a loader's sampler, or None for all.

    Raises:
        DataError: a pass in a fixed order cannot reproduce the choice.
    """
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        sampler = getattr(loader, "sampler", None)
    else:
        # A loader with a custom batch sampler also has a SequentialSampler, but never
        # uses it. A subclass of BatchSampler may choose other examples.
        is_torchs = getattr(type(batches), "__iter__", 0) is BatchSampler.__iter__
        sampler = batches.sampler if is_torchs else batches
    # Torch gives the loader of an IterableDataset a sampler of its own.
    if sampler is None or isinstance(loader.dataset, IterableDataset):
        return None
    # Ask for exact types, because a subclass may choose other examples.
    if type(sampler) is SubsetRandomSampler:
        # A pass would draw from the generator of the sampler. Its indices may be an
        # array or a tensor.
        return sorted(map(index, sampler.indices))
    if type(sampler) is DistributedSampler:
        return sorted(map(index, set(sampler)))
    # A SequentialSampler uses all examples in an epoch. A RandomSampler draws all,
    # unless it is set to draw fewer or more, or some twice.
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else -1
    twice = getattr(sampler, "replacement", False)
    is_known = type(sampler) in (SequentialSampler, RandomSampler)
    if is_known and len(sampler) == size and not twice:
        return None
    raise DataError(
        f"{name_of(loader.dataset)}: the loader's sampler, {type(sampler).__name__},"
        " chooses examples in a way that a pass in a fixed order cannot reproduce."
        " Choose a client's examples with torch.utils.data.Subset. Pass a second loader"
        " of them, without this sampler; under FedTAN, its batch_size must be the size"
        " of the first batch in training."
    )


# --- reading a batch -------------------------------------------------------------------


def reader(data: Any, collate: Callable[[list[Any]], Any]) -> Read:
    """Return the function that reads batches of a data set like its ``DataLoader``.

    Rows of tensors are taken by one index, because stacking them gives the same bits.
    Other data sets are read by their ``__getitems__`` like in torch, or one example at
    a time if they lack it.

    Args:
        data: a data set with a length.
        collate: makes a batch of a list of examples.
    """
    if collate is default_collate and _has_rows(data):
        return functools.partial(_rows, data)
    return functools.partial(_collated, data, collate)


def name_of(data: Any) -> str:
    """Return the class of a data set and the classes of the data sets inside it."""
    inner = data.dataset if type(data) is Subset else None
    name = type(data).__name__
    return name if inner is None else f"{name} of {name_of(inner)}"


# --- rows of tensors ------------------------------------------------------------------
def _has_rows(data: Any) -> bool:
    """Return whether all examples are rows of tensors.

    Only classes of torch are considered, because a subclass may read differently.
    """
    if type(data) is Subset:
        return _has_rows(data.dataset)
    if type(data) is not TensorDataset:
        return False
    for tensor in data.tensors:
        strided = tensor.layout is torch.strided and not tensor.is_quantized
        if type(tensor) is not Tensor or not strided:
            return False
    return True


def _rows(data: Any, chosen: Sequence[int]) -> list[Tensor]:
    """Return the rows of each tensor, as ``default_collate`` would stack them."""
    if type(data) is Subset:
        return _rows(data.dataset, [data.indices[number] for number in chosen])
    at = torch.tensor(chosen, device="cpu")
    at += (at < 0) * len(data)  # a subset may count from the end
    return [each.index_select(0, at.to(each.device)) for each in data.tensors]


# --- examples -------------------------------------------------------------------------
def _collated(data: Any, collate: Callable[[Any], Any], chosen: Sequence[int]) -> Any:
    """Return the examples as a batch, read and assembled like in the loader."""
    if callable(getattr(data, "__getitems__", None)):
        return collate(data.__getitems__(chosen))
    return collate([data[number] for number in chosen])


# --- reading in advance ------------------------------------------------------------
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
    # Such a reader runs no code of the user, so it draws no numbers.
    if getattr(read, "func", None) is _rows:
        yield from map(read, order)
        return
    # Draw nothing from the default generator, because the model draws from it.
    source = generator or torch.Generator().manual_seed(torch.initial_seed())
    tasks: list[SeededBatch] = []
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

    def __getitem__(self, task: SeededBatch) -> Any:
        """Return the batch of a task."""
        chosen, seed = task
        # Users' transforms draw from the default generators of torch, NumPy, Python. A
        # worker has one thread, and the last bits of a sum depend on this number.
        with seeded(seed), threads(1):
            return self._read(chosen)


def _from_workers(
    reading: _Reading, tasks: list[SeededBatch], loader: Any, data: Any
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

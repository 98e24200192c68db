"""The memory of a process for one run, such as warnings and built models.

A client and often its model are made for each message, so they cannot keep such values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

# This is module state, because no object of a client exists as long as its run. The end
# of a run empties the registry, so the next run in the process gives the same warnings.
_KEPT: dict[str, Any] = {}


@contextmanager
def memory_of_run() -> Iterator[None]:
    """Forget all kept values at both ends of the block. The block is one run."""
    _KEPT.clear()  # of clients that were called outside a run
    try:
        yield
    finally:
        _KEPT.clear()


def kept_for_run(name: str, make: Callable[[], T]) -> T:
    """Return the object of this name, made by ``make`` at its first use in a run."""
    kept: T | None = _KEPT.get(name)
    # Another thread may have made the object in the meantime.
    return _KEPT.setdefault(name, make()) if kept is None else kept


def _facts() -> Counter[Hashable]:
    return kept_for_run("facts", Counter[Hashable])


def is_noted(*fact: Hashable) -> bool:
    """Return whether the fact was noted in this run."""
    return fact in _facts()


def note(*fact: Hashable) -> None:
    """Note the fact until the end of the run."""
    _facts()[fact] += 1


def first_time(*fact: Hashable) -> bool:
    """Note the fact and return whether it is new in this run."""
    is_new = not is_noted(*fact)
    note(*fact)
    return is_new


def is_due(*fact: Hashable) -> bool:
    """Return whether the next note of the fact is number 1, 2, 4, 8 and so on."""
    return (_facts()[fact] + 1).bit_count() == 1

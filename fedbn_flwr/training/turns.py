"""One client of a process computes at a time: it takes its turn, and gives it back
while it waits for other clients.

The default random generators are those of the client whose turn it is; while nobody has
a turn, they are as before. Turns are handed over in the order of asking, and only the
thread whose turn has come wakes up: a synchronised step hands them over some hundred
times a round.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from fedbn_flwr.training.randomness import Generators, seed_generators

__all__ = ["Wait", "interrupted", "one_after_the_other", "turn"]

logger = logging.getLogger("flwr")


class _Turns:
    """The turns of one process. A place is a held lock; its release hands the turn to
    the thread that waits there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[threading.Lock] = deque()
        self._taken = False
        # as they were before somebody had a turn
        self._outside: Generators | None = None

    def ask(self, place: threading.Lock) -> None:
        """Release ``place`` when its turn has come."""
        with self._lock:
            if self._taken:
                self._queue.append(place)
                return
            self._taken = True
            with _logged():
                self._outside = Generators.now()
        place.release()

    def take(self) -> None:
        """Wait for a turn."""
        place = _held_lock()
        self.ask(place)
        place.acquire()

    def pass_on(self) -> None:
        """Let those in the queue have their turns first, if there are any."""
        place = _held_lock()
        with self._lock:
            if not self._queue:
                return
            self._queue.append(place)
            self._queue.popleft().release()
        place.acquire()

    def give(self) -> None:
        """Hand the turn over to the next in the queue."""
        with self._lock:
            if self._queue:
                self._queue.popleft().release()
                return
            # Nobody has a turn now: the process draws from where it was.
            outside = self._outside
            self._outside = None
            self._taken = False
            if outside is not None:
                with _logged():
                    outside.restore()


@contextmanager
def _logged() -> Iterator[None]:
    """Log an exception of the block: a client that broke the generators does not keep
    its turn.
    """
    try:
        yield
    except Exception as error:
        logger.warning(
            "the random generators stay as a client left them: %s: %s",
            type(error).__name__,
            error,
        )


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


_TURNS = _Turns()
# After a fork the child has a copy of the turns, but not the threads that would give
# them back.
os.register_at_fork(after_in_child=lambda: globals().update(_TURNS=_Turns()))
# A context variable, not a thread's number: a user may train in a thread with a copied
# context (asyncio.to_thread).
_HAS_TURN: ContextVar[bool] = ContextVar("has_turn", default=False)


@contextmanager
def turn(seed: int | None) -> Iterator[None]:
    """Wait until no other client of this process computes; then seed the default
    generators for the block.

    None: the block seeds them itself.
    """
    # A turn that this thread has already is one of ``one_after_the_other``.
    has_turn = _HAS_TURN.get()
    with nullcontext() if has_turn else one_after_the_other():
        if seed is not None:
            seed_generators(seed)
        yield


@contextmanager
def one_after_the_other() -> Iterator[Callable[[], None]]:
    """Take a turn for the block, in which several clients compute; call its value
    between two of them.

    The generators of the process are saved and restored once. Clients of other threads,
    which wait, are not kept waiting for the whole block.
    """
    _TURNS.take()
    token = _HAS_TURN.set(True)
    try:
        yield _TURNS.pass_on
    finally:
        _HAS_TURN.reset(token)
        _TURNS.give()


@contextmanager
def interrupted() -> Iterator[None]:
    """Let other clients of this process compute while this one waits; without effect
    outside a turn.
    """
    with Wait():
        yield


class Wait:
    """A client's wait, as a ``with`` block without its turn. After ``end`` the client
    is in the queue for a turn again.

    Outside a turn there is none to give back. The end of the block ends the wait, too.
    """

    def __init__(self) -> None:
        self._has_turn = _HAS_TURN.get()
        # Here, not in __enter__: if it fails, nobody knows this wait yet, and its end
        # takes no turn.
        self._generators = Generators.now() if self._has_turn else None
        # Its release is the turn; outside a turn it is the end of the wait.
        self._place = _held_lock()
        self._open = threading.Lock()  # held once the wait has ended
        self._over = False

    def __enter__(self) -> Wait:
        if self._has_turn:
            self._token = _HAS_TURN.set(False)
            _TURNS.give()
        return self

    def end(self) -> None:
        """End the wait, in any thread; a second call has no effect."""
        if not self._open.acquire(blocking=False):
            return
        if self._has_turn:
            _TURNS.ask(self._place)
        else:
            self._place.release()

    def is_over(self, seconds: float) -> bool:
        """Return whether the wait has ended, and the turn has come, after at most so
        many seconds.
        """
        self._over = self._over or self._place.acquire(timeout=seconds)
        return self._over

    def __exit__(self, *error: Any) -> None:
        self.end()
        if not self._over:
            self._place.acquire()
        if self._generators is not None:
            _HAS_TURN.reset(self._token)
            self._generators.restore()

"""The turns of the clients of one process.

A client takes its turn, and gives it back while it waits for other clients. During a
turn, the default random generators have the state of this client. Between turns, they
have the state of the process. The next turn goes to the client that asked first, and
only its thread wakes up: a synchronised step passes some hundred turns per round.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fedbn_flwr.training.randomness import Generators, seed_generators

logger = logging.getLogger("flwr")


class _Turns:
    """The turns of one process.

    A place in the queue is a held lock. The release of this lock gives the turn to the
    thread that waits for the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[threading.Lock] = deque()
        self._taken = False
        # the state of the generators before the first turn
        self._outside: Generators | None = None

    def ask(self, place: threading.Lock) -> None:
        """Queue for a turn. A release of the lock ``place`` gives the turn."""
        with self._lock:
            if self._taken:
                self._queue.append(place)
                return
            self._taken = True
            with _logged():
                self._outside = Generators.now()
        place.release()

    def pass_on(self) -> None:
        """Give the turn to the clients in the queue, and wait for the next turn."""
        place = _held_lock()
        with self._lock:
            if not self._queue:
                return
            self._queue.append(place)
            self._queue.popleft().release()
        place.acquire()

    def give(self) -> bool:
        """Give the turn to the next client in the queue.

        Return whether there was one.
        """
        with self._lock:
            if self._queue:
                self._queue.popleft().release()
                return True
            # Nobody waits any more: restore the state that the random generators had
            # before the first turn.
            outside = self._outside
            self._outside = None
            self._taken = False
            if outside is not None:
                with _logged():
                    outside.restore()
            return False


@contextmanager
def _logged() -> Iterator[None]:
    """Log an exception of the block instead of raising it.

    A client that broke the generators must not keep its turn.
    """
    try:
        yield
    except Exception as error:
        logger.warning(
            "the state of the random generators remains as a client left it: %s: %s",
            type(error).__name__,
            error,
        )


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


_TURNS = _Turns()
# Give a forked child new turns. Its copy of the turns lacks the threads that would give
# them back.
os.register_at_fork(after_in_child=lambda: globals().update(_TURNS=_Turns()))
# This is a context variable and not a thread's number, because a user may train in a
# thread with a copied context (asyncio.to_thread).
_HAS_TURN: ContextVar[bool] = ContextVar("has_turn", default=False)


@contextmanager
def turn(seed: int | None = None) -> Iterator[Callable[[], None]]:
    """Wait for a turn, and seed the default generators for the block.

    During the block no other client of this process computes. With ``seed=None`` the
    generators are not seeded here, because the block itself seeds them.

    The ``with`` statement gives a function. A block that computes several clients calls
    it between two of them, so that waiting clients of other threads get their turns. The
    generators of the process are then saved and restored once.
    """
    # Do not take a second turn in a thread that has one.
    takes = not _HAS_TURN.get()
    if takes:
        place = _held_lock()
        _TURNS.ask(place)
        place.acquire()
    token = _HAS_TURN.set(True)
    try:
        if seed is not None:
            seed_generators(seed)
        yield _TURNS.pass_on
    finally:
        _HAS_TURN.reset(token)
        if takes:
            _TURNS.give()


class Wait:
    """A ``with`` block that gives the client's turn back while the client waits.

    After ``end``, the client is in the queue for a turn again. The end of the block
    also ends the wait. If the client has no turn, the block only waits.

    Attributes:
        passed_on: whether another client got the turn at the start of the block.
    """

    passed_on = False

    def __init__(self) -> None:
        self._has_turn = _HAS_TURN.get()
        # Save the generators here and not in __enter__. If saving fails here, the wait
        # has not begun, and the end of the block takes no turn.
        self._generators = Generators.now() if self._has_turn else None
        # Releasing ``_place`` gives the turn. Outside a turn, releasing it ends the
        # wait.
        self._place = _held_lock()
        self._open = threading.Lock()  # acquired when the wait has ended
        self._over = False

    def __enter__(self) -> Wait:
        if self._has_turn:
            self._token = _HAS_TURN.set(False)
            self.passed_on = _TURNS.give()
        return self

    def end(self) -> None:
        """End the wait, from any thread. A second call has no effect."""
        if not self._open.acquire(blocking=False):
            return
        if self._has_turn:
            _TURNS.ask(self._place)
        else:
            self._place.release()

    def is_over(self, seconds: float) -> bool:
        """Return whether the wait has ended and the turn has come.

        The call takes at most ``seconds``.
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

"""Named random streams, the default generators of a process, and its turns.

One seed has many named streams. Every draw of a run uses a generator that is named by
its purpose and, if they matter, by server round and partition id. Different draws never
share a stream, and a stream does not depend on the process or thread that uses it.

A model's dropout, a user's augmentation and a user's shuffling draw from the default
generators of torch, NumPy and Python. These draws are repeatable, and equal in every
engine. The reasons are that the generators are seeded for each message, and that only
one client at a time computes in a process.

A client takes its turn, and gives it back while it waits for other clients. During a
turn, the default random generators have the state of this client. Between turns, they
have the state of the process. The next turn goes to the client that asked first, and
only its thread wakes up: a synchronised step passes some hundred turns per round.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch

logger = logging.getLogger("flwr")


# --- named streams --------------------------------------------------------------------
def derive_seed(seed: int, purpose: str, *keys: int | str) -> int:
    """Return the 63-bit seed of the stream ``purpose``/``keys``."""
    # Use a hash that is equal on every machine. Python's ``hash`` is not.
    name = "/".join([str(int(seed)), purpose, *map(str, keys)])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def torch_generator(seed: int, purpose: str, *keys: int | str) -> torch.Generator:
    """Return a CPU generator for the stream, for use with any device."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *keys))


def numpy_generator(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    """Return a NumPy generator for the stream."""
    return np.random.default_rng(derive_seed(seed, purpose, *keys))


# --- the default generators -----------------------------------------------------------


class Generators(NamedTuple):
    """The state of all default generators, including every CUDA device."""

    torch: torch.Tensor
    cuda: list[torch.Tensor]
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> Generators:
        """Return the current state."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        numpy = np.random.get_state(legacy=False)
        return cls(torch.get_rng_state(), cuda, numpy, random.getstate())

    def restore(self) -> None:
        """Give the generators this state."""
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        elif _has_gpu():
            # The saved state has no GPU state, because no GPU had been used. If a GPU
            # was used since then, seed it as at its first use: torch then takes this
            # seed.
            torch.cuda.manual_seed_all(torch.initial_seed())
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@functools.cache  # torch asks the driver at each call
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def seed_generators(seed: int, *, cpu_only: bool = False) -> None:
    """Seed the default generators of torch (all CUDA devices), NumPy and Python.

    Args:
        seed: the seed.
        cpu_only: leave out the generators of CUDA devices.
    """
    # torch.manual_seed asks every backend and takes longer than a training step
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    # torch saves the seed until the first use of the GPU
    if not cpu_only and _has_gpu():
        torch.cuda.manual_seed_all(seed)


def seed_secretly() -> None:
    """Seed the default generators with entropy of the operating system.

    Use it for draws that must not depend on the seed of the run.
    """
    torch.default_generator.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
    if _has_gpu():
        torch.cuda.manual_seed_all(int.from_bytes(os.urandom(8), "little") >> 1)
    np.random.seed(np.frombuffer(os.urandom(4 * 624), np.uint32))
    random.seed(os.urandom(64))


@contextmanager
def seeded(seed: int, *, cpu_only: bool = False) -> Iterator[Generators]:
    """Seed the default generators in the block, and restore them afterwards.

    The target of ``with ... as`` is the state before the block.
    ``seed_generators`` explains ``cpu_only``.
    """
    before = Generators.now()
    seed_generators(seed, cpu_only=cpu_only)
    try:
        yield before
    finally:
        before.restore()


# --- turns ----------------------------------------------------------------------------


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

"""The default random generators of torch, NumPy and Python, seeded for one client at a
time.

A model's dropout, a user's augmentation and a user's shuffling draw from the default
generators of the process. They repeat, and are the same in every engine, because the
generators are seeded for each message, and because in one process only one client
computes at a time (``turns``).
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from fedbn_flwr.training.numpy_state import NumpyState

__all__ = [
    "Generators",
    "drawing_from",
    "seed_generators",
    "seed_secretly",
    "seeded",
    "seeded_on_cpu",
]


class Generators(NamedTuple):
    """The state of the default generators; on CUDA, of all devices."""

    torch: torch.Tensor
    cuda: list[torch.Tensor]
    numpy: NumpyState
    python: Any

    @classmethod
    def now(cls) -> Generators:
        """Return the present state."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        return cls(torch.get_rng_state(), cuda, NumpyState.now(), random.getstate())

    def restore(self) -> None:
        """Give the generators this state."""
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        elif _has_gpu():
            # The GPU was not used before, and may have been since: torch's first use of
            # it takes this seed.
            torch.cuda.manual_seed_all(torch.initial_seed())
        self.numpy.restore()
        random.setstate(self.python)


@functools.cache  # torch asks the driver at each call
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def seed_generators(seed: int) -> None:
    """Seed the default generators of torch (on CUDA, of all devices), NumPy and Python."""
    _seed_on_cpu(seed)
    if _has_gpu():  # before the first use of the GPU torch keeps the seed for it
        torch.cuda.manual_seed_all(seed)


def _seed_on_cpu(seed: int) -> None:
    # torch.manual_seed asks every backend, which takes longer than a step
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_secretly() -> None:
    """Seed them with the operating system's entropy, for what must not follow the run's
    seed.
    """
    torch.default_generator.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
    if _has_gpu():
        torch.cuda.manual_seed_all(int.from_bytes(os.urandom(8), "little") >> 1)
    np.random.seed(np.frombuffer(os.urandom(4 * 624), np.uint32))
    random.seed(os.urandom(64))


@contextmanager
def seeded(seed: int) -> Iterator[Generators]:
    """Seed the default generators in the block, and restore the state before it, which
    is the block's value.
    """
    before = Generators.now()
    seed_generators(seed)
    try:
        yield before
    finally:
        before.restore()


@contextmanager
def seeded_on_cpu(seed: int) -> Iterator[None]:
    """As ``seeded``; the generators of accelerators stay as they are."""
    before = Generators.now()
    _seed_on_cpu(seed)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Let the default generators draw from this one in the block, on the CPU from all
    of its state; it moves on.
    """
    before = Generators.now()
    # NumPy and Python have generators of other kinds: they are seeded by a draw.
    words = torch.randint(2**32, (624,), generator=generator).numpy().astype(np.uint32)
    np.random.seed(words)
    random.seed(words.tobytes())
    torch.set_rng_state(generator.get_state())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(int.from_bytes(words[:2].tobytes(), "little") >> 1)
    try:
        yield
    finally:
        # The next batch goes on from here, and not with the same draws.
        generator.set_state(torch.get_rng_state())
        before.restore()

"""Named random streams, and the default generators of a process.

One seed has many named streams. Every draw of a run uses a generator that is named by
its purpose and, if they matter, by server round and partition id. Different draws never
share a stream, and a stream does not depend on the process or thread that uses it.

A model's dropout, a user's augmentation and a user's shuffling draw from the default
generators of torch, NumPy and Python. These draws are repeatable, and equal in every
engine. The reasons are that the generators are seeded for each message, and that only
one client at a time computes in a process (``transport.turns``).
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


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

"""Named random streams, and the default generators of a process.

One seed has many named streams. Every draw of a run uses a generator that is named by
its purpose and, if they matter, by server round and partition id. Different draws never
share a stream, and a stream does not depend on the process or thread that uses it.

A model's dropout, a user's augmentation and a user's shuffling draw from the default
generators of torch, NumPy and Python. These draws are repeatable, and equal in every
engine. The reasons are that the generators are seeded for each message, and that only
one client at a time computes in a process (``turns``).
"""

from __future__ import annotations

import ctypes
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
_WORDS = 624
_BYTES = 4 * _WORDS + 4  # the words of MT19937, and the position in them


class NumpyGenerator(NamedTuple):
    """A state of NumPy's default generator that is fast to save and restore.

    A synchronised step saves and restores the state some hundred times a round. Each
    call takes 16 microseconds here, and 150 with ``np.random.get_state``. The bits are
    copied from and to the memory of the generator; NumPy publishes its address
    (``BitGenerator.ctypes``). NumPy draws normal numbers in pairs, and keeps the second
    number outside this memory, for the next call. A call that does not change the bits
    returns that number.

    Attributes:
        bits: the memory of the generator, or b"" if its layout is unknown.
        kept: the normal number for the next call, or None if NumPy keeps no number.
        whole: the result of ``np.random.get_state(legacy=False)``, for a generator with
            an unknown layout.
    """

    bits: bytes
    kept: float | None = None
    whole: Any = None

    @classmethod
    def now(cls) -> NumpyGenerator:
        """Return the current state."""
        bits = _bits()
        if not bits:
            return cls(b"", None, np.random.get_state(legacy=False))
        # NumPy draws normal numbers in pairs and keeps the second number. Only a draw
        # reveals whether it keeps one, so restore the state afterwards.
        state = cls(bits, _take_kept(bits))
        state._write()
        return state

    def restore(self) -> None:
        """Give the generator this state."""
        now = _bits()
        if now and self.bits:
            _take_kept(now)  # otherwise the next draw would return the kept number
            self._write()
        else:
            np.random.set_state(self.whole or self._as_whole())

    def _write(self) -> None:
        """Write the state to a generator without a kept number."""
        if self.kept is not None:
            np.random.set_state(self._as_whole())
            return
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined,unused-ignore]
        with generator.lock:
            ctypes.memmove(generator.ctypes.state_address, self.bits, _BYTES)

    def _as_whole(self) -> dict[str, Any]:
        words = np.frombuffer(self.bits, np.uint32)
        state = {"key": words[:_WORDS], "pos": int(words[_WORDS])}
        kept = {"has_gauss": int(self.kept is not None), "gauss": self.kept or 0.0}
        return {"bit_generator": "MT19937", "state": state, **kept}


def _take_kept(bits: bytes) -> float | None:
    """Return NumPy's kept normal number, or None if NumPy keeps no number.

    ``bits`` is the memory of the generator before the call. After the call NumPy keeps
    no number, and the memory may have changed.
    """
    number = np.random.standard_normal()
    if _bits() == bits:
        return number
    np.random.standard_normal()  # discard the second number of the pair
    return None


def _bits() -> bytes:
    """Return the memory of the default generator, or b"" for an unknown layout."""
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined,unused-ignore]
    # a program may replace NumPy's default generator
    if not _KNOWN_LAYOUT or type(generator) is not np.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _BYTES)


def _layout_is_known() -> bool:
    """Return whether an MT19937 has the memory layout that is read here.

    The layout consists of the words, followed by the position.
    """
    generator = np.random.MT19937(1)
    generator.random_raw(7)
    memory = np.frombuffer(
        ctypes.string_at(generator.ctypes.state_address, _BYTES), np.uint32
    )
    state: Any = generator.state["state"]
    return bool(
        np.array_equal(memory[:_WORDS], state["key"]) and memory[_WORDS] == state["pos"]
    )


_KNOWN_LAYOUT = _layout_is_known()


class Generators(NamedTuple):
    """The state of all default generators; on CUDA, of every device."""

    torch: torch.Tensor
    cuda: list[torch.Tensor]
    numpy: NumpyGenerator
    python: Any

    @classmethod
    def now(cls) -> Generators:
        """Return the current state."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        return cls(torch.get_rng_state(), cuda, NumpyGenerator.now(), random.getstate())

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
        self.numpy.restore()
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

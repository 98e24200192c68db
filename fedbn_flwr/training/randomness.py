"""One seed, many named random streams; and the default generators of torch, NumPy and
Python, seeded for one client at a time.

Every draw of a run uses a generator that is named by its purpose and, if they matter,
by server round and partition id. Different draws never share a stream, and a stream
does not depend on the process or thread that uses it.

A model's dropout, a user's augmentation and a user's shuffling draw from the default
generators of the process. They repeat, and are the same in every engine, because the
generators are seeded for each message, and because in one process only one client
computes at a time (``turns``).
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

__all__ = [
    "Generators",
    "NumpyGenerator",
    "derive_seed",
    "drawing_from",
    "numpy_generator",
    "seed_generators",
    "seed_secretly",
    "seeded",
    "seeded_on_cpu",
    "torch_generator",
]


# --- named streams --------------------------------------------------------------------
def derive_seed(seed: int, purpose: str, *keys: int | str) -> int:
    """Return the 63-bit seed of the stream ``purpose``/``keys``."""
    # A hash of the names that is the same on every machine; Python's ``hash`` is not.
    name = "/".join([str(int(seed)), purpose, *map(str, keys)])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def torch_generator(seed: int, purpose: str, *keys: int | str) -> torch.Generator:
    """Return a CPU ``torch.Generator`` for the stream, whose draws fit every device."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *keys))


def numpy_generator(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    """Return a NumPy generator for the stream."""
    return np.random.default_rng(derive_seed(seed, purpose, *keys))


# --- the default generators -----------------------------------------------------------
_WORDS = 624
_BYTES = 4 * _WORDS + 4  # the words of MT19937, and the position in them


class NumpyGenerator(NamedTuple):
    """A state of NumPy's default generator, saved and restored in a fraction of the
    time of ``np.random.get_state``.

    A synchronised step does both some hundred times a round; each takes 16 microseconds
    here, and 150 there. The bits are copied from and to the memory of the generator,
    whose address NumPy publishes (``BitGenerator.ctypes``). NumPy draws normal numbers
    in pairs, and keeps the second one elsewhere, for the next call: a call that does
    not change the bits returns it.

    Attributes:
        bits: the memory of the generator; b"" if its layout is not known here.
        kept: the normal number for the next call; None = none is kept.
        whole: what ``np.random.get_state(legacy=False)`` returns, of a generator whose
            layout is not known.
    """

    bits: bytes
    kept: float | None = None
    whole: Any = None

    @classmethod
    def now(cls) -> NumpyGenerator:
        """Return the present state."""
        bits = _bits()
        if not bits:
            return cls(b"", None, np.random.get_state(legacy=False))
        # Only a draw tells whether a number is kept: put all back as it was.
        state = cls(bits, _take_kept(bits))
        state._write()
        return state

    def restore(self) -> None:
        """Give the generator this state."""
        now = _bits()
        if now and self.bits:
            _take_kept(now)  # else the next draw would return it
            self._write()
        else:
            np.random.set_state(self.whole or self._as_whole())

    def _write(self) -> None:
        """Write the state where no number is kept."""
        if self.kept is not None:
            np.random.set_state(self._as_whole())
            return
        generator = _generator()
        with generator.lock:
            ctypes.memmove(generator.ctypes.state_address, self.bits, _BYTES)

    def _as_whole(self) -> dict[str, Any]:
        words = np.frombuffer(self.bits, np.uint32)
        state = {"key": words[:_WORDS], "pos": int(words[_WORDS])}
        kept = {"has_gauss": int(self.kept is not None), "gauss": self.kept or 0.0}
        return {"bit_generator": "MT19937", "state": state, **kept}


def _take_kept(bits: bytes) -> float | None:
    """Return the normal number that is kept. Then none is, and the generator, which had
    these bits, may have moved.
    """
    number = np.random.standard_normal()
    if _bits() == bits:
        return number
    np.random.standard_normal()  # the second of the pair that was drawn
    return None


def _bits() -> bytes:
    """Return the memory of the default generator; b"" if its layout is not known."""
    generator = _generator()
    # NumPy lets a program replace it
    if not _KNOWN_LAYOUT or type(generator) is not np.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _BYTES)


def _generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined,unused-ignore]


def _layout_is_known() -> bool:
    """Return whether words and position lie in the memory of an MT19937 as they are
    read here.
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
    """The state of the default generators; on CUDA, of all devices."""

    torch: torch.Tensor
    cuda: list[torch.Tensor]
    numpy: NumpyGenerator
    python: Any

    @classmethod
    def now(cls) -> Generators:
        """Return the present state."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        return cls(torch.get_rng_state(), cuda, NumpyGenerator.now(), random.getstate())

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

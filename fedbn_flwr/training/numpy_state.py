"""The state of NumPy's default generator, saved and restored in a fiftieth of the time of ``np.random.get_state``.

A synchronised step does both some hundred times a round. The bits are copied from the memory of the generator, whose
address NumPy publishes (``BitGenerator.ctypes``). NumPy draws normal numbers in pairs, and keeps the second one
elsewhere. But as long as the bits are those of a state that had none, there is none: what draws one changes the bits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = ["NumpyState"]

_WORDS = 624
_BYTES = 4 * _WORDS + 4  # the words of MT19937, and the position in them


class NumpyState(NamedTuple):
    """A state of NumPy's default generator.

    Attributes:
        bits: the memory of the generator; b"" if its layout is not known here.
        whole: what ``np.random.get_state(legacy=False)`` returns.
    """

    bits: bytes
    whole: Any

    @classmethod
    def now(cls) -> NumpyState:
        """Return the present state."""
        latest, bits = _SEEN.latest, _bits()
        if not latest.is_all_of(bits):
            _SEEN.latest = latest = cls(bits, np.random.get_state(legacy=False))
        return latest

    def restore(self) -> None:
        """Give the generator this state."""
        if self.is_all_of(self.bits) and NumpyState.now().is_all_of(bits := _bits()):
            if bits != self.bits:
                generator = _generator()
                with generator.lock:
                    ctypes.memmove(generator.ctypes.state_address, self.bits, _BYTES)
        else:
            np.random.set_state(self.whole)
        _SEEN.latest = self

    def is_all_of(self, bits: bytes) -> bool:
        """Return whether a generator with these bits has this state, and no normal number is kept."""
        return bool(bits) and bits == self.bits and not self.whole["has_gauss"]


@dataclass
class _Seen:
    """The latest state that was saved or restored."""

    latest: NumpyState


def _bits() -> bytes:
    """Return the memory of the default generator; b"" if it is not NumPy's own."""
    generator = _generator()
    own = _KNOWN_LAYOUT and type(generator) is np.random.MT19937
    return ctypes.string_at(generator.ctypes.state_address, _BYTES) if own else b""


def _generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined,unused-ignore]


def _layout_is_known() -> bool:
    """Return whether words and position lie in the memory of an MT19937 as they are read here."""
    generator = np.random.MT19937(1)
    generator.random_raw(7)
    memory = np.frombuffer(ctypes.string_at(generator.ctypes.state_address, _BYTES), np.uint32)
    state: Any = generator.state["state"]
    return bool(np.array_equal(memory[:_WORDS], state["key"]) and memory[_WORDS] == state["pos"])


_KNOWN_LAYOUT = _layout_is_known()
_SEEN = _Seen(NumpyState(b"", None))

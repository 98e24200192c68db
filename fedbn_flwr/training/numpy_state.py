"""The state of NumPy's default generator, saved and restored in a fraction of the time
of ``np.random.get_state``.

A synchronised step does both some hundred times a round; each takes 16 microseconds
here, and 150 there. The bits are copied from and to the memory of the generator, whose
address NumPy publishes (``BitGenerator.ctypes``). NumPy draws normal numbers in pairs,
and keeps the second one elsewhere, for the next call: a call that does not change the
bits returns it.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

__all__ = ["NumpyState"]

_WORDS = 624
_BYTES = 4 * _WORDS + 4  # the words of MT19937, and the position in them


class NumpyState(NamedTuple):
    """A state of NumPy's default generator.

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
    def now(cls) -> NumpyState:
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

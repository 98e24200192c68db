"""The state of a strategy, as a checkpoint holds it: JSON values, and arrays."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr.checked_file import read_checked, write_checked


def through_a_file(state: Any) -> Any:
    """Return the state as it comes back from a checkpoint's file, with the same bits.

    Raises:
        TypeError: it holds a value that JSON does not have.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        write_checked(path, state)
        read = read_checked(path)
    # JSON makes a text of a key that is none
    assert bits(read) == bits(state)
    return read


def bits(state: Any) -> Any:
    """Return the state with each array as its dtype, shape and bytes: two states with
    the same bits are equal.
    """
    # A number of float64 comes back as Python's.
    if isinstance(state, np.ndarray | np.generic) and not isinstance(state, float):
        return state.dtype.str, state.shape, state.tobytes()
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return (
        [bits(value) for value in state] if isinstance(state, (list, tuple)) else state
    )

"""Checkpoints of strategies, with JSON values and arrays."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr.checked_file import read_checked, write_checked


def through_a_file(state: Any):
    """Return the state after a write to and a read from a checkpoint's file.

    It has the same bits.

    Raises:
        TypeError: the state contains a value that JSON does not support.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        write_checked(path, state)
        read = read_checked(path)
    # JSON turns keys that are not text into text.
    assert bits(read) == bits(state)
    return read


def bits(state: Any):
    """Return the state with each array as its dtype, shape and bytes.

    Two states are equal if they have the same bits.
    """
    # A float64 number returns as a number of Python.
    if isinstance(state, np.ndarray | np.generic) and not isinstance(state, float):
        return state.dtype.str, state.shape, state.tobytes()
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return (
        [bits(value) for value in state] if isinstance(state, (list, tuple)) else state
    )

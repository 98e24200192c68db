"""The state of a strategy, as a checkpoint holds it: JSON values, and arrays."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def through_a_file(state: Any) -> Any:
    """Return the state as it comes back from a file: lists for tuples, copies of
    arrays, no other type.

    Raises:
        TypeError: it holds a value that JSON does not have, or a key that is no text.
    """
    arrays: list[np.ndarray] = []

    def written(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value.copy())
            return {"array": len(arrays) - 1}
        if isinstance(value, dict):
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise TypeError(f"the key {wrong[0]!r} is no text")
            return {
                "entries": {str(key): written(entry) for key, entry in value.items()}
            }
        return (
            [written(entry) for entry in value]
            if isinstance(value, (list, tuple))
            else value
        )

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            return (
                arrays[value["array"]]
                if "array" in value
                else {k: read(v) for k, v in value["entries"].items()}
            )
        return [read(entry) for entry in value] if isinstance(value, list) else value

    return read(json.loads(json.dumps(written(state))))


def bits(state: Any) -> Any:
    """Return the state with each array as its dtype, shape and bytes: two states with
    the same bits are equal.
    """
    if isinstance(state, np.ndarray):
        return state.dtype.str, state.shape, state.tobytes()
    if isinstance(state, dict):
        return {str(key): bits(value) for key, value in state.items()}
    return (
        [bits(value) for value in state] if isinstance(state, (list, tuple)) else state
    )

"""Files that are written in one step and checked by SHA-256 when they are read.

A checked file is a safetensors file. Its metadata are ``about``, a JSON tree with the
names of the arrays, and ``sha256``, a hash of this text and all arrays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedbn_flwr.atomic_file import remove_leftovers, write_atomically
from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.records import state_sha256

__all__ = [
    "encode_safetensors",
    "read_checked",
    "remove_leftovers",
    "write_atomically",
    "write_checked",
]

# In the tree of a file, {"__array__": "model/fc.weight"} stands for the array of that
# name.
_ARRAY = "__array__"


def encode_safetensors(arrays: State, metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file whose bytes depend only on the content."""
    in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    data = save(in_order, metadata=dict(metadata))
    # ``save`` puts the metadata in random order, so write the header again. The first 8
    # bytes are the length of the header.
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    for name, place in json.loads(data[8:start]).items():
        if name in arrays:
            header[name] = place
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + data[start:]


def write_checked(path: Path, content: Mapping[str, Any]) -> None:
    """Write a tree of JSON values and arrays to a file for the owner only (0600).

    Raises:
        OSError: the file could not be written. Then an old file does not change.
    """
    arrays: dict[str, Array] = {}
    about = json.dumps(_take_out(content, "", arrays))
    metadata = {"about": about, "sha256": _sha256(about, arrays)}
    write_atomically(path, encode_safetensors(arrays, metadata), mode=0o600)


def read_checked(path: Path) -> dict[str, Any]:
    """Return the tree of a checked file with the same bits, and with lists for tuples.

    Raises:
        StateError: the file is incomplete, was edited, or is not a checked file.
    """
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about, expected = metadata["about"], metadata["sha256"]
        # The arrays in the file are sorted by size, but the hash uses the tree's order.
        in_order: dict[str, Array] = {}
        content: dict[str, Any] = _put_back(json.loads(about), arrays, in_order)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise StateError(
            f"{path} cannot be read ({type(error).__name__}: {error})"
        ) from error
    if _sha256(about, in_order) != expected or len(in_order) != len(arrays):
        raise StateError(
            f"{path} is damaged or was edited, because its SHA-256 does not match."
            " Restore it from a copy, or delete it and start from an earlier file"
        )
    return content


def _sha256(about: str, arrays: State) -> str:
    return hashlib.sha256(f"{about}\n{state_sha256(arrays)}".encode()).hexdigest()


def _take_out(value: Any, name: str, arrays: dict[str, Array]) -> Any:
    """Return the tree with names for arrays, and add the arrays to ``arrays``."""
    # This includes np.float64, a subclass of float. JSON preserves its bits.
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # The name of each array is the path to its place in the tree.
    prefix = f"{name}/" if name else ""
    if isinstance(value, Mapping):
        items = value.items()
        return {key: _take_out(item, f"{prefix}{key}", arrays) for key, item in items}
    if isinstance(value, (list, tuple)):
        numbered = enumerate(value)
        return [_take_out(item, f"{name}/{at}", arrays) for at, item in numbered]
    arrays[name] = np.asarray(value)
    return {_ARRAY: name}


def _put_back(value: Any, arrays: State, in_order: dict[str, Array]) -> Any:
    """Return the tree with its arrays, and add them to ``in_order`` in tree order."""
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            in_order[value[_ARRAY]] = arrays[value[_ARRAY]]
            return in_order[value[_ARRAY]]
        return {key: _put_back(item, arrays, in_order) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_back(item, arrays, in_order) for item in value]
    return value

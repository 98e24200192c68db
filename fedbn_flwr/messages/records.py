"""State dicts to Flower's ArrayRecords and back, exact in dtype, shape and order, also for 0-dim and int64 entries."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.errors import StateError

__all__ = [
    "decode",
    "from_record",
    "num_bytes",
    "state_sha256",
    "tensors",
    "to_record",
    "to_state",
]

# Version 1.0 of NumPy's file format, an array in C order; the header ends in a line feed.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>[<>|][a-z]\d+)', 'fortran_order': False, "
    rb"'shape': \((?P<shape>[\d, ]*)\), \} *\n",
    re.DOTALL,
)


def to_state(state_dict: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """Return the tensors as NumPy arrays, detached and on the CPU; they share memory if torch allows it.

    Raises:
        StateError: an entry's dtype has no NumPy counterpart (bfloat16, float8), by name.
    """
    arrays: dict[str, Array] = {}
    for name, tensor in state_dict.items():
        try:
            arrays[name] = tensor.detach().cpu().contiguous().numpy()
        except TypeError as error:
            raise StateError(
                f"entry '{name}' is {tensor.dtype}, which Flower's records cannot carry. Keep the model's state in "
                "float32 (mixed precision goes through autocast, amp=true)."
            ) from error
    return arrays


def to_record(state: Mapping[str, torch.Tensor] | State) -> ArrayRecord:
    """Return an ArrayRecord with the entries of a state dict (tensors) or of a state (arrays), in the same order."""
    if any(isinstance(value, torch.Tensor) for value in state.values()):
        state = to_state(state)  # type: ignore[arg-type]
    return ArrayRecord({name: FlowerArray(np.asarray(array)) for name, array in state.items()})


def from_record(record: ArrayRecord) -> dict[str, Array]:
    """Return a fresh copy of each of the record's arrays, by name."""
    return {name: decode(array) for name, array in record.items()}


def decode(array: FlowerArray) -> Array:
    """Return a fresh copy of a Flower array as NumPy array, as ``array.numpy()`` does, but thread-safe.

    NumPy reads the header of its format with ``ast``, which in threads of Python 3.11.7 sometimes raises
    "SystemError: AST constructor recursion depth mismatch" (python/cpython#106905).
    """
    if (header := _NPY.match(array.data)) is None:
        return array.numpy()  # another version, Fortran order or no array: NumPy reads it or raises
    shape = tuple(int(size) for size in header["shape"].split(b",") if size.strip())
    flat = np.frombuffer(array.data, dtype=header["dtype"].decode(), offset=header.end())
    return flat.reshape(shape).copy()


def tensors(state: State) -> dict[str, torch.Tensor]:
    """Return the arrays as tensors by name, sharing their memory."""
    return {name: torch.from_numpy(np.asarray(array)) for name, array in state.items()}


def num_bytes(record: ArrayRecord) -> tuple[int, int]:
    """Return the bytes of floating entries and of all others (int64 counters), without headers."""
    floats = others = 0
    for array in record.values():
        dtype = np.dtype(array.dtype)
        size = int(np.prod(array.shape, dtype=np.int64)) * dtype.itemsize
        if np.issubdtype(dtype, np.inexact):
            floats += size
        else:
            others += size
    return floats, others


def state_sha256(state: State, local: Mapping[str, str] | None = None) -> str:
    """Return the SHA-256 of a state (names, dtypes, shapes, bytes, in order) and of the clients' local parts.

    Args:
        state: the global state.
        local: hash of each client's local part by partition id; added in the order of partition ids.
    """
    digest = hashlib.sha256()
    for name, array in state.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    for partition, own in sorted((local or {}).items(), key=lambda item: int(item[0])):
        digest.update(f"local {partition} {own}\n".encode())
    return digest.hexdigest()

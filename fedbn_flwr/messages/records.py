"""State dicts to Flower's ArrayRecords and back, exact in dtype, shape and order, also
for 0-dim and int64 entries.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Collection, Mapping
from io import BytesIO
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord
from numpy.lib.format import write_array_header_1_0

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.compat.flower import BufferArray, array_of_bytes, filled
from fedbn_flwr.errors import StateError

__all__ = [
    "LONGEST_HEADER",
    "decode",
    "encode",
    "from_record",
    "npy_header",
    "npy_layout",
    "num_bytes",
    "select",
    "state_sha256",
    "tensors",
    "to_record",
    "to_state",
    "view",
    "views",
]

# Version 1.0 of NumPy's file format; the header ends in a line feed.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>[<>|][a-z]\d+)', 'fortran_order':"
    rb" (?P<fortran>False|True), "
    rb"'shape': \((?P<shape>[\d, ]*)\), \} *\n",
    re.DOTALL,
)
# of those that are read here and remembered; NumPy reads longer ones
LONGEST_HEADER = 1024


def to_state(state_dict: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """Return the tensors as NumPy arrays, detached and on the CPU; they share memory if
    torch allows it.

    Raises:
        StateError: an entry's dtype has no NumPy counterpart (bfloat16, float8), by
            name.
    """
    return {
        name: _to_numpy(name, tensor.detach().contiguous())
        for name, tensor in state_dict.items()
    }


def _to_numpy(name: str, tensor: torch.Tensor) -> Array:
    try:
        return tensor.detach().cpu().numpy()
    except TypeError as error:
        raise StateError(
            f"entry '{name}' is {tensor.dtype}, which Flower's records cannot carry."
            " Keep the model's state in float32 (mixed precision goes through"
            " autocast, amp=true)."
        ) from error


def to_record(state: Mapping[str, torch.Tensor] | State) -> ArrayRecord:
    """Return an ArrayRecord with the entries of a state dict (tensors) or of a state
    (arrays), in the same order.

    Raises:
        StateError: a tensor's dtype has no NumPy counterpart (bfloat16, float8), or an
            entry is no array, by name.
    """
    arrays: dict[str, FlowerArray] = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            arrays[name] = encode(value)
        elif isinstance(value, torch.Tensor):
            arrays[name] = encode(_to_numpy(name, value), order="C")
        elif value is None or isinstance(value, (bytes, Mapping)):
            raise StateError(
                f"entry '{name}' is a {type(value).__name__}, as get_extra_state of a"
                " layer may return it, and cannot be sent: let it return a tensor, or"
                " keep the value in an attribute"
            )
        else:
            arrays[name] = encode(np.asarray(value))
    return filled(ArrayRecord, arrays)


def encode(array: Array, order: Literal["C", "K"] = "K") -> FlowerArray:
    """Return the array as Flower array, as ``flwr.app.Array(array)`` does, with one
    copy of the array's bytes.

    ``order="C"`` writes C order also for an array in Fortran order, which is written as
    it is otherwise.
    """
    if array.dtype.kind not in "biufc":
        return FlowerArray(array)
    fortran = order == "K" and array.flags.fnc
    dtype, header = npy_header(array.dtype, array.shape, fortran)
    source = array.T if fortran else array
    if source.flags.c_contiguous:
        data = b"".join((header, source.data))
    else:
        buffer = BytesIO(bytes(len(header) + array.nbytes))
        buffer.write(header)
        np.ndarray(array.shape, array.dtype, buffer.getbuffer(), len(header))[...] = (
            array
        )
        data = buffer.getvalue()
    return array_of_bytes(dtype, array.shape, data)


@functools.lru_cache(maxsize=4096)
def npy_header(
    dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool
) -> tuple[str, bytes]:
    """Return the dtype's name and the header of NumPy's file format."""
    out = BytesIO()
    write_array_header_1_0(
        out, {"descr": dtype.str, "fortran_order": fortran, "shape": shape}
    )
    return str(dtype), out.getvalue()


def from_record(record: ArrayRecord) -> dict[str, Array]:
    """Return a fresh copy of each of the record's arrays, by name."""
    return {name: decode(array) for name, array in record.items()}


def views(record: ArrayRecord) -> dict[str, Array]:
    """Return a read-only view of each of the record's arrays, by name; see ``view``."""
    return {name: view(array) for name, array in record.items()}


def decode(array: FlowerArray) -> Array:
    """Return a fresh copy of a Flower array as NumPy array in C order; see ``view``."""
    return view(array).copy()


def view(array: FlowerArray) -> Array:
    """Return a Flower array as read-only NumPy array that shares its memory;
    thread-safe.

    A ``BufferArray`` may lie in any buffer of bytes, such as shared memory. What is not
    a plain array in version 1.0 of NumPy's format is read by NumPy, in memory of its
    own.

    NumPy reads the header of its format with ``ast``, which in threads of Python 3.11.7
    sometimes raises "SystemError: AST constructor recursion depth mismatch"
    (python/cpython#106905).
    """
    data = array.buffer if isinstance(array, BufferArray) else array.data
    end = 10 + int.from_bytes(data[8:10], "little")
    if layout := npy_layout(bytes(data[: min(end, LONGEST_HEADER)])):
        dtype, shape, order = layout
        values = np.frombuffer(data, dtype, offset=end).reshape(shape, order=order)
    else:
        values = array.numpy()  # or it raises
    values.flags.writeable = False
    return values


@functools.lru_cache(maxsize=4096)
def npy_layout(
    header: bytes,
) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]] | None:
    """Return dtype, shape and order that a header of NumPy's file format names; None
    for another header.
    """
    if (match := _NPY.fullmatch(header)) is None:
        return None
    shape = tuple(int(size) for size in match["shape"].split(b",") if size.strip())
    return (
        np.dtype(match["dtype"].decode()),
        shape,
        "F" if match["fortran"] == b"True" else "C",
    )


def select(record: ArrayRecord, names: Collection[str]) -> ArrayRecord:
    """Return a record with the entries of these names, in the record's order; it shares
    their arrays.
    """
    return filled(
        ArrayRecord, {name: array for name, array in record.items() if name in names}
    )


def tensors(state: State) -> dict[str, torch.Tensor]:
    """Return the arrays as tensors by name, sharing their memory. Do not write to
    tensors of read-only arrays.
    """
    arrays = {name: np.asarray(array) for name, array in state.items()}
    return {
        n: torch.from_numpy(a if a.flags.writeable else np.asarray(_Alias(a)))
        for n, a in arrays.items()
    }


class _Alias:
    """The memory of a read-only array, offered as writable; torch has no read-only
    tensors and would warn.
    """

    def __init__(self, array: Array) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._array = array  # keeps the memory


def num_bytes(record: ArrayRecord) -> tuple[int, int]:
    """Return the bytes of floating entries and of all others (int64 counters), without
    headers.
    """
    floats = others = 0
    for array in record.values():
        itemsize, is_float = _item(array.dtype)
        size = math.prod(array.shape) * itemsize
        if is_float:
            floats += size
        else:
            others += size
    return floats, others


@functools.lru_cache(maxsize=64)
def _item(dtype: str) -> tuple[int, bool]:
    kind = np.dtype(dtype)
    return kind.itemsize, np.issubdtype(kind, np.inexact)


def state_sha256(state: State, local: Mapping[str, str] | None = None) -> str:
    """Return the SHA-256 of a state (names, dtypes, shapes, bytes, in order) and of the
    clients' local parts.

    Args:
        state: the global state.
        local: hash of each client's local part by partition id; added in the order of
            partition ids.
    """
    digest = hashlib.sha256()
    for name, array in state.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    for partition, sha256 in sorted(
        (local or {}).items(), key=lambda item: int(item[0])
    ):
        digest.update(f"local {partition} {sha256}\n".encode())
    return digest.hexdigest()

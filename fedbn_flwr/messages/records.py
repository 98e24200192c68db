"""State dicts to Flower's ArrayRecords and back, exact in dtype, shape and order.

The bytes are those of Flower's own ``Array``: an array in NumPy's file format. Header
and data are written and read here, as Flower's way through NumPy copies more often.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from io import BytesIO
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib.format import write_array_header_1_0

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.compat.flower import BufferArray, array_of_bytes, filled
from fedbn_flwr.errors import StateError

__all__ = [
    "LONGEST_HEADER",
    "Traffic",
    "decode",
    "encode",
    "from_record",
    "npy_header",
    "npy_layout",
    "num_bytes",
    "of_kind",
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
    """Return the tensors as NumPy arrays on the CPU, which share memory if possible.

    Raises:
        StateError: an entry's dtype has no NumPy counterpart (bfloat16, float8), by
            name.
    """
    arrays = {}
    for name, tensor in state_dict.items():
        arrays[name] = _to_numpy(name, tensor.detach().contiguous())
    return arrays


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
    """Return an ArrayRecord of a state dict (tensors) or a state (arrays), in order.

    Raises:
        StateError: a tensor's dtype has no NumPy counterpart (bfloat16, float8), or an
            entry is no array, by name.
    """
    arrays: dict[str, FlowerArray] = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            arrays[name] = encode(value)
        elif isinstance(value, torch.Tensor):
            # A channels-last tensor would be sent in another order on each machine.
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
    """Return ``flwr.app.Array(array)``, with one copy of the array's bytes.

    ``order="C"`` writes C order also for an array in Fortran order, which is written as
    it is otherwise.
    """
    # Of objects and texts the bytes are not the values.
    if array.dtype.kind not in "biufc":
        return FlowerArray(array)
    fortran = order == "K" and array.flags.fnc
    dtype, header = npy_header(array.dtype, array.shape, fortran)
    # The bytes of an array in Fortran order are those of its transpose in C order.
    source = array.T if fortran else array
    if source.flags.c_contiguous:
        data = b"".join((header, source.data))
    else:
        # With gaps, as a slice: NumPy copies it into its place behind the header.
        buffer = BytesIO(bytes(len(header) + array.nbytes))
        buffer.write(header)
        place = np.ndarray(array.shape, array.dtype, buffer.getbuffer(), len(header))
        place[...] = array
        # ``getvalue`` fails while somebody may write to the buffer
        del place
        data = buffer.getvalue()
    return array_of_bytes(dtype, array.shape, data)


@functools.lru_cache(maxsize=4096)
def npy_header(
    dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool
) -> tuple[str, bytes]:
    """Return the dtype's name and the header of NumPy's file format."""
    out = BytesIO()
    about = {"descr": dtype.str, "fortran_order": fortran, "shape": shape}
    write_array_header_1_0(out, about)
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
    """Return a Flower array as read-only NumPy array that shares its memory.

    A ``BufferArray`` may lie in any buffer of bytes, such as shared memory. What is not
    a plain array in version 1.0 of NumPy's format is read by NumPy, in memory of its
    own.
    """
    # Not all by NumPy, which reads a header with ``ast``: in threads of Python 3.11.7
    # that sometimes raises SystemError (python/cpython#106905).
    data = array.buffer if isinstance(array, BufferArray) else array.data
    # bytes 8 and 9: the length of the header behind them
    end = 10 + int.from_bytes(data[8:10], "little")
    layout = npy_layout(bytes(data[: min(end, LONGEST_HEADER)]))
    if layout:
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
    """Return dtype, shape and order that a header names; None if it is not plain."""
    match = _NPY.fullmatch(header)
    if match is None:
        return None
    dtype = np.dtype(match["dtype"].decode())
    shape = tuple(int(size) for size in match["shape"].split(b",") if size.strip())
    return dtype, shape, "F" if match["fortran"] == b"True" else "C"


def select(record: ArrayRecord, names: Collection[str]) -> ArrayRecord:
    """Return a record with the entries of these names, in order, sharing arrays."""
    chosen = {name: array for name, array in record.items() if name in names}
    return filled(ArrayRecord, chosen)


def tensors(state: State) -> dict[str, torch.Tensor]:
    """Return the arrays as tensors by name, sharing their memory.

    Do not write to tensors of read-only arrays.
    """
    found = {}
    for name, value in state.items():
        array = np.asarray(value)
        if not array.flags.writeable:
            array = np.asarray(_Alias(array))
        found[name] = torch.from_numpy(array)
    return found


class _Alias:
    """The memory of a read-only array, offered as writable."""

    # torch has no read-only tensors, and would warn.
    def __init__(self, array: Array) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._array = array  # keeps the memory


def num_bytes(record: ArrayRecord) -> tuple[int, int]:
    """Return the bytes of floating entries and of all others, without headers."""
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
    """Return the SHA-256 of a state and of the clients' local parts.

    Names, dtypes, shapes and bytes count, and their order.

    Args:
        state: the global state.
        local: hash of each client's local part by partition id; added in the order of
            partition ids.
    """
    digest = hashlib.sha256()
    for name, array in state.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    parts = (local or {}).items()
    for partition, sha256 in sorted(parts, key=lambda item: int(item[0])):
        digest.update(f"local {partition} {sha256}\n".encode())
    return digest.hexdigest()


Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)


def of_kind(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """Return the records of this class by name, in order, in a dict of its own."""
    # Not by isinstance, which for these classes, ABCs, is a call in Python.
    found: dict[str, Record] = {}
    for key, record in content.items():
        if kind in type(record).__mro__:
            found[key] = record  # type: ignore[assignment]
    return found


@dataclass
class Traffic:
    """Bytes of the arrays in the messages, without headers; counts are listed apart, as
    in the papers.

    Counts are integer entries (int64 counters), and the examples per element in
    exchanges (``batchnorm.sync``).

    Attributes:
        exchanges: round trips between the server and its clients.
        down: bytes of floats that the server sent; one broadcast of the same arrays
            counts once, as in the papers.
        up: bytes of floats that all clients sent.
        counters_down: bytes of counts that the server sent; a broadcast counts once.
        counters_up: bytes of counts that all clients sent.
    """

    exchanges: int = 0
    down: int = 0
    up: int = 0
    counters_down: int = 0
    counters_up: int = 0

    @property
    def megabytes(self) -> float:
        """Floats down and up in MB of 2^20 bytes, as in the papers."""
        return (self.down + self.up) / 2**20

    def plus(self, other: Traffic, times: int = 1) -> Traffic:
        """Return the sum of this traffic and ``times`` the other."""
        names = [field.name for field in fields(self)]
        return Traffic(
            *(getattr(self, name) + times * getattr(other, name) for name in names)
        )

    def count_down(self, size: tuple[int, int]) -> None:
        """Count one broadcast: (bytes of floats, bytes of others)."""
        self.down += size[0]
        self.counters_down += size[1]

    def count_up(self, size: tuple[int, int]) -> None:
        """Count one client's arrays: (bytes of floats, bytes of others)."""
        self.up += size[0]
        self.counters_up += size[1]

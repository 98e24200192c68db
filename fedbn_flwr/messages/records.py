"""Conversion between state dicts and Flower's ArrayRecords.

It is exact in dtype, shape and order. The bytes are equal to the bytes of Flower's own
``Array``: an array in NumPy's file format. Header and data are written and read here,
because Flower's use of NumPy makes more copies.
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
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.lib.format import write_array_header_1_0

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.compat.flower import BufferArray, array_of_bytes, filled, values_of

__all__ = [
    "LONGEST_HEADER",
    "Traffic",
    "decode",
    "encode",
    "from_record",
    "model_record",
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
# only headers up to this length are read here and cached; NumPy reads longer headers
LONGEST_HEADER = 1024


def to_state(state_dict: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """Return the tensors as NumPy arrays on the CPU.

    The arrays share memory with the tensors if possible.

    Raises:
        TypeError: the dtype of an entry does not exist in NumPy (bfloat16, float8).
    """
    arrays = {}
    for name, tensor in state_dict.items():
        arrays[name] = tensor.detach().contiguous().cpu().numpy()
    return arrays


def to_record(state: Mapping[str, torch.Tensor] | State) -> ArrayRecord:
    """Return an ArrayRecord of a state dict (tensors) or a state (arrays), in order.

    Raises:
        TypeError: a tensor's dtype does not exist in NumPy (bfloat16, float8).
        ValueError: an entry is not an array.
    """
    arrays: dict[str, FlowerArray] = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            arrays[name] = encode(value)
        elif isinstance(value, torch.Tensor):
            # ``to_state`` returns C order. The order of a channels-last tensor would
            # differ between machines.
            arrays[name] = encode(to_state({name: value})[name])
        else:
            arrays[name] = encode(np.asarray(value))
    return filled(ArrayRecord, arrays)


def encode(array: Array) -> FlowerArray:
    """Return ``flwr.app.Array(array)``, with one copy of the array's bytes.

    An array in Fortran order is written in Fortran order.
    """
    # Let Flower encode objects and texts, because their bytes in memory are not their
    # values.
    if array.dtype.kind not in "biufc":
        return FlowerArray(array)
    fortran = array.flags.fnc
    dtype, header = npy_header(array.dtype, array.shape, fortran)
    # The bytes of an array in Fortran order are the bytes of its transpose in C order.
    source = array.T if fortran else array
    if source.flags.c_contiguous:
        data = b"".join((header, source.data))
    else:
        # The array has gaps, for example as a slice. Let NumPy copy it behind the
        # header.
        buffer = BytesIO(bytes(len(header) + array.nbytes))
        buffer.write(header)
        place = np.ndarray(array.shape, array.dtype, buffer.getbuffer(), len(header))
        place[...] = array
        # Delete ``place``, because ``getvalue`` fails while another object may write to
        # the buffer.
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
    """Return a read-only view of each array of the record, by name."""
    return {name: view(array) for name, array in values_of(record).items()}


def decode(array: FlowerArray) -> Array:
    """Return a fresh copy of a Flower array as a NumPy array in C order."""
    return view(array).copy()


def view(array: FlowerArray) -> Array:
    """Return a Flower array as read-only NumPy array that shares its memory.

    A ``BufferArray`` may be in any buffer of bytes, such as shared memory. An array
    that is not plain (version 1.0 of NumPy's format) is copied by NumPy.
    """
    # Do not let NumPy read all arrays. It reads a header with ``ast``, and in threads
    # of Python 3.11.7 this sometimes raises SystemError (python/cpython#106905).
    data = array.buffer if isinstance(array, BufferArray) else array.data
    # Bytes 8 and 9 contain the length of the header that follows them.
    end = 10 + int.from_bytes(data[8:10], "little")
    layout = npy_layout(bytes(data[: min(end, LONGEST_HEADER)]))
    if layout:
        dtype, shape, order = layout
        values = np.frombuffer(data, dtype, offset=end).reshape(shape, order=order)
    else:
        values = array.numpy()  # raises an exception for invalid bytes
    values.flags.writeable = False
    return values


@functools.lru_cache(maxsize=4096)
def npy_layout(
    header: bytes,
) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]] | None:
    """Return the dtype, shape and order in a header, or None if it is not plain."""
    match = _NPY.fullmatch(header)
    if match is None:
        return None
    dtype = np.dtype(match["dtype"].decode())
    shape = tuple(int(size) for size in match["shape"].split(b",") if size.strip())
    return dtype, shape, "F" if match["fortran"] == b"True" else "C"


def select(record: ArrayRecord, names: Collection[str]) -> ArrayRecord:
    """Return a record with only these entries, in order, sharing the arrays."""
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
    """The memory of a read-only array, presented as writable."""

    # torch has no read-only tensors and would warn about a read-only array.
    def __init__(self, array: Array) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._array = array  # keeps the memory alive


def num_bytes(record: ArrayRecord) -> tuple[int, int]:
    """Return the bytes of floating and of all other entries, without headers."""
    floats = others = 0
    for array in values_of(record).values():
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
    """Return the SHA-256 of a state and of the clients' local states.

    The hash depends on names, dtypes, shapes, bytes and their order.

    Args:
        state: the global state.
        local: the hash of each client's local state by partition id. The hashes are
            added in the order of the partition ids.
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
    """Return the records of this class by name, in order, in a new dict."""
    # Do not use isinstance: for these abstract classes, it calls a slow Python
    # function.
    found: dict[str, Record] = {}
    for key, record in values_of(content).items():
        if kind in type(record).__mro__:
            found[key] = record
    return found


def model_record(message: Message) -> tuple[str, ArrayRecord]:
    """Return the name and the record of the model, the first ArrayRecord."""
    return next(iter(of_kind(message.content, ArrayRecord).items()))


@dataclass
class Traffic:
    """Bytes of the arrays in the messages, without headers.

    Counts are listed separately, as in the papers. They are integer entries (int64
    counters), and the examples per element in exchanges (``batchnorm.sync``).

    Attributes:
        exchanges: round trips between the server and its clients.
        down: bytes of floats sent by the server. A broadcast of the same arrays counts
            once, as in the papers.
        up: bytes of floats sent by all clients.
        counters_down: bytes of counts sent by the server; a broadcast counts once.
        counters_up: bytes of counts sent by all clients.
    """

    exchanges: int = 0
    down: int = 0
    up: int = 0
    counters_down: int = 0
    counters_up: int = 0

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum of this traffic and the other."""
        names = [field.name for field in fields(self)]
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in names))

    def count_down(self, size: tuple[int, int]) -> None:
        """Count one broadcast, given (bytes of floats, bytes of other entries)."""
        self.down += size[0]
        self.counters_down += size[1]

    def count_up(self, size: tuple[int, int]) -> None:
        """Count a client's arrays, given (bytes of floats, bytes of other entries)."""
        self.up += size[0]
        self.counters_up += size[1]

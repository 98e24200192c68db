"""The link between a command and its worker processes.

Values are pickled, except that their large arrays are in shared memory. Shared memory
is a file in memory without a name. The system frees it when both processes have ended,
even if they were killed. The descriptor of the file goes over the pipe once.

In this module, shared memory is an array of bytes, never a memoryview. Sending a
received array again exports its buffer. Up to Python 3.12.6, the garbage collector ends
the process by SIGSEGV if a cycle refers to a memoryview with an exported buffer
(python/cpython#77894). The collector does not visit arrays.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import socket
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
import torch
from flwr.app import Array as FlowerArray

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.compat.flower import BufferArray

_LARGE = 2**10  # bytes; smaller arrays stay in the pickle
_ALIGNED = 64  # bytes; in shared memory, each array begins at a multiple of this number
# Number of broadcasts that are remembered. A round has two: the whole model for new
# clients, and the shared part for the others.
_REMEMBERED = 3
_MAX_BUFFERS = 512  # the most buffers in one system call
_keys = itertools.count(1)  # keys of pieces of shared memory


@dataclass
class Packed:
    """A pickled value and the bytes of its large arrays.

    Attributes:
        body: the pickle.
        buffers: the bytes of large arrays, without a copy.
        key: number of a broadcast, or 0. A process receives a broadcast's bytes once.
        file: descriptor of the shared memory with the bytes of a broadcast.
    """

    body: bytes
    buffers: list[memoryview]
    key: int = 0
    file: int = -1

    @classmethod
    def of(cls, value: Any) -> Packed:
        """Pack a value."""
        buffers = []

        def in_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if len(raw) < _LARGE:
                return True
            buffers.append(raw)
            return False

        body = io.BytesIO()
        _Pickler(body, protocol=5, buffer_callback=in_band).dump(value)
        return cls(body.getvalue(), buffers)

    def write(self) -> int:
        """Write the buffers to new shared memory and return its descriptor."""
        file = os.memfd_create("fedbn-flwr")
        left: list[memoryview] = []
        for buffer in self.buffers:
            left += (buffer, _PADDING[: -len(buffer) % _ALIGNED])
        # The system may write fewer bytes than it got, and stop inside a buffer.
        try:
            while left:
                written = os.writev(file, left[:_MAX_BUFFERS])
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if written:
                    left[0] = left[0][written:]
        except OSError:
            os.close(file)  # gives the memory back that was written so far
            raise
        return file


_PADDING = memoryview(bytes(_ALIGNED))
_NOTHING = np.empty(0, np.uint8)


class _Pickler(pickle.Pickler):
    """Pickles Flower's arrays without a copy of their bytes."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, FlowerArray):
            return NotImplemented
        # Flower's array contains bytes, which pickle would copy. At the other end, the
        # array is a view of shared memory.
        data = value.buffer if isinstance(value, BufferArray) else value.data
        buffer = pickle.PickleBuffer(data)
        return BufferArray, (value.dtype, value.shape, value.stype, buffer)


class Broadcasts:
    """The latest messages to many clients. Their arrays are written only once."""

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[int, ...], Packed] = OrderedDict()
        self._lock = threading.Lock()

    def pack(self, value: Any) -> Packed:
        """Pack a value as a broadcast."""
        packed = Packed.of(value)
        if not packed.buffers:
            return packed
        # All messages of one broadcast contain the same array objects. The remembered
        # buffers keep the objects alive, because otherwise their ids would be reused.
        same = tuple(id(buffer.obj) for buffer in packed.buffers)
        # The lock also keeps the file open until its descriptor has been copied.
        with self._lock:
            if same not in self._files:
                packed.file = packed.write()
                packed.key = next(_keys)
                self._files[same] = packed
                if len(self._files) > _REMEMBERED:
                    _, oldest = self._files.popitem(last=False)
                    os.close(oldest.file)
            known = self._files[same]
            return Packed(packed.body, packed.buffers, known.key, os.dup(known.file))

    def close(self) -> None:
        """Forget the messages."""
        while self._files:
            _, packed = self._files.popitem()
            os.close(packed.file)


@dataclass
class WorkerPipe:
    """One end of a pipe. Any thread may send, but only one thread receives."""

    pipe: Connection
    pid: int = 0  # id of the process at the other end
    _sent: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _received: OrderedDict[int, Array] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, head: Any, *values: Packed) -> None:
        """Send a small value and packed values, without bytes that the other end has.

        Raises:
            OSError: the other end is closed.
        """
        # The lock keeps a message and its descriptors together, because the receiver
        # reads them in this order.
        with self._lock:
            files: list[int] = []
            about = []
            try:
                # Collect the information for reassembling each value.
                for packed in values:
                    file = packed.file
                    if packed.buffers and not packed.key:
                        file = packed.write()
                    new = file >= 0 and packed.key not in self._sent
                    if new:
                        files.append(file)
                    sizes = [len(buffer) for buffer in packed.buffers]
                    about.append((packed.body, sizes, packed.key, new))
                self.pipe.send_bytes(pickle.dumps((head, about), protocol=5))
                for file in files:
                    send_handle(self.pipe, file, self.pid)
            finally:
                # The other end has its own descriptors. Close ours, including the
                # descriptors of broadcasts that were not sent again.
                for file in {*files} | {packed.file for packed in values if packed.key}:
                    os.close(file)
            for packed in values:
                if packed.key:
                    _save(self._sent, packed.key, None)

    def receive(self) -> tuple[Any, list[Any]]:
        """Return the next small value and the unpacked values.

        Raises:
            EOFError: the other end is closed.
        """
        head, about = pickle.loads(self.pipe.recv_bytes())
        values = []
        for body, sizes, key, new in about:
            # The large arrays are views of the shared memory and are never copied.
            memory = _NOTHING
            if new:
                memory = _mapped(recv_handle(self.pipe))
                memory.flags.writeable = False
            elif key:
                memory = self._received[key]
            if key:
                _save(self._received, key, memory)
            values.append(pickle.loads(body, buffers=_slices(memory, sizes)))
        return head, values

    def close(self) -> None:
        """End the link, so that receivers at both ends get EOFError."""
        # Shut down the socket, because closing the descriptor would not wake up a
        # thread of this process that reads from it.
        with suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


def _save(known: OrderedDict[int, Any], key: int, value: Any) -> None:
    """Save a broadcast and forget the oldest broadcast."""
    # Both ends do this in the order of sending, so they forget the same broadcasts.
    known[key] = value
    known.move_to_end(key)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)


def _slices(memory: Array, sizes: Sequence[int]) -> list[Array]:
    """Return the buffers that ``Packed.write`` has written."""
    slices = []
    start = 0
    for size in sizes:
        slices.append(memory[start : start + size])
        start += size + -size % _ALIGNED
    return slices


def _mapped(file: int) -> Array:
    """Return the file's bytes and close the descriptor."""
    # Close the descriptor, because a process may have only some thousand open files,
    # and a server that keeps its replies would need one for each. torch ends the
    # mapping with the last array.
    try:
        size = os.fstat(file).st_size
        mapped = torch.from_file(
            f"/dev/fd/{file}", shared=True, size=size, dtype=torch.uint8
        )
    finally:
        os.close(file)
    return mapped.numpy()

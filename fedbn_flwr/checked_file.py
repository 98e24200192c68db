"""Files that are complete or absent, and checked by SHA-256 when they are read.

A file is written in one step, so it is complete even if the process is killed.

A checked file is a safetensors file. Its metadata are ``about``, a JSON tree with the
names of the arrays, and ``sha256``, a hash of this text and all arrays.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.records import state_sha256

__all__ = [
    "decode_checked",
    "encode_checked",
    "encode_safetensors",
    "read_checked",
    "remove_leftovers",
    "write_atomically",
    "write_checked",
]

# The types of arrays in a safetensors file, in the order of its format.
_TYPES = (
    *("BOOL", "U8", "I8", "I16", "U16", "F16", "I32", "U32", "F32", "C64"),
    *("F64", "I64", "U64"),
)
# In the tree of a file, {"__array__": "model/fc.weight"} stands for the array of that
# name.
_ARRAY = "__array__"
# The same for complex128, which the format lacks: an array of pairs of float64.
_PAIRS = "__pairs__"


# --- a file in one step ---------------------------------------------------------------


def write_atomically(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Write a file in one step.

    The temporary file is locked while it is written, so that ``remove_leftovers`` does
    not remove it.

    Args:
        path: the file.
        content: the whole content.
        mode: the permissions, before the umask.
    """
    # Write the temporary file in the same folder, because a rename works only within
    # one file system.
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(_open_locked(temporary, mode), "wb") as file:
            file.write(data)
            file.flush()
            # Write the content to the disk before the rename. Otherwise, a loss of
            # power may leave an empty file under the final name.
            os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # Write the folder to the disk too, because it contains the new name.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _open_locked(path: Path, mode: int) -> int:
    """Create, open and lock a file, if its file system has locks."""
    while True:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        # If the file has no name any more, another process removed it as a leftover
        # before the lock.
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove the unlocked temporary files of processes that were killed."""
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):  # locked or gone, or the file system has no locks
            handle = os.open(path, os.O_WRONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


# --- checked files --------------------------------------------------------------------


def encode_safetensors(arrays: State, metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file whose bytes depend only on the content.

    The bytes equal the bytes of ``safetensors.numpy.save``, which puts the metadata in
    random order and copies the arrays four times.
    """
    # The largest types come first, so that each array is aligned.
    order = sorted(arrays, key=lambda name: (-_TYPES.index(_type(arrays[name])), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    content, start = [], 0
    for name in order:
        array = np.asarray(arrays[name], order="C")
        offsets = start, start + array.nbytes
        header[name] = {
            "dtype": _type(array),
            "shape": array.shape,
            "data_offsets": offsets,
        }
        content.append(array.data)
        start = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin at a multiple of 8 bytes
    # The first 8 bytes are the length of the header.
    return b"".join((len(text).to_bytes(8, "little"), text, *content))


def _type(array: Array) -> str:
    """Return the name of an array's type in a safetensors file."""
    kind = array.dtype.kind
    return "BOOL" if kind == "b" else f"{kind.upper()}{8 * array.itemsize}"


def encode_checked(content: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the bytes of a checked file, and the SHA-256 of its arrays.

    Args:
        content: a tree of JSON values and arrays.
    """
    arrays: dict[str, Array] = {}
    about = json.dumps(_take_out(content, "", arrays))
    sha256 = state_sha256(arrays)
    metadata = {"about": about, "sha256": _sha256(about, sha256)}
    return encode_safetensors(arrays, metadata), sha256


def write_checked(path: Path, content: Mapping[str, Any]) -> None:
    """Write a tree of JSON values and arrays to a file for the owner only (0600).

    Raises:
        OSError: the file could not be written. Then an old file does not change.
    """
    write_atomically(path, encode_checked(content)[0], mode=0o600)


def decode_checked(data: bytes) -> dict[str, Any]:
    """Return the tree in the bytes of ``encode_checked``, without a check."""
    return _decoded(data)[0]


def read_checked(path: Path) -> dict[str, Any]:
    """Return the tree of a checked file.

    The bits are the same, but tuples become lists.

    Raises:
        StateError: the file is incomplete, was edited, or is not a checked file.
    """
    try:
        content, arrays, metadata = _decoded(path.read_bytes())
        about, expected = metadata["about"], metadata["sha256"]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise StateError(
            f"{path} cannot be read ({type(error).__name__}: {error})"
        ) from error
    if _sha256(about, state_sha256(arrays)) != expected:
        raise StateError(
            f"{path} is damaged or was edited, because its SHA-256 does not match."
            " Restore it from a copy, or delete it and start from an earlier file"
        )
    return content


def _decoded(data: bytes) -> tuple[dict[str, Any], State, Mapping[str, str]]:
    """Return the tree, its arrays by name in the order of the tree, and the metadata."""
    found = load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header["__metadata__"]
    # The arrays in the file are sorted by size, but the hash uses the tree's order.
    arrays: dict[str, Array] = {}
    content: dict[str, Any] = _put_back(json.loads(metadata["about"]), found, arrays)
    return content, arrays, metadata


def _sha256(about: str, of_arrays: str) -> str:
    return hashlib.sha256(f"{about}\n{of_arrays}".encode()).hexdigest()


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
    array = np.asarray(value)
    if array.dtype == np.complex128:
        arrays[name] = np.stack([array.real, array.imag], -1)
        return {_PAIRS: name}
    arrays[name] = array
    return {_ARRAY: name}


def _put_back(value: Any, arrays: State, in_order: dict[str, Array]) -> Any:
    """Return the tree with its arrays, and add them to ``in_order`` in tree order."""
    if isinstance(value, dict):
        if value.keys() in ({_ARRAY}, {_PAIRS}):
            ((kind, name),) = value.items()
            array = in_order[name] = arrays[name]
            return array if kind == _ARRAY else array.view(np.complex128)[..., 0]
        return {key: _put_back(item, arrays, in_order) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_back(item, arrays, in_order) for item in value]
    return value

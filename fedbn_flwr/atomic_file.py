"""Files that are complete or absent, whenever the process that writes is killed."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["remove_leftovers", "write_atomically"]


def write_atomically(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Write a file in one step.

    The temporary file is locked while it is written, so that ``remove_leftovers``
    leaves it alone.

    Args:
        path: the file.
        content: the whole content.
        mode: the permissions, before the umask.
    """
    # A temporary file in the same folder: a rename replaces within a file system only.
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(_open_locked(temporary, mode), "wb") as file:
            file.write(data)
            file.flush()
            # before the rename, or a loss of power may leave the name of an empty file
            os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # the name, too, must be on the disk
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _open_locked(path: Path, mode: int) -> int:
    """Create, open and lock a file; on a file system without locks it stays unlocked."""
    while True:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        # without a name, it was removed as a leftover before it was locked
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that were killed; a locked one stays."""
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):  # it is locked, gone, or the file system has no locks
            handle = os.open(path, os.O_WRONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)

"""Files that are complete or absent, even if the writing process is killed."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Write a file in one step.

    The temporary file is locked while it is written, so that ``remove_leftovers`` does
    not remove it.

    Args:
        path: the file.
        content: the whole content.
        mode: the permissions, before the umask.
    """
    # Use the same folder, because a rename replaces only within one file system.
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(_open_locked(temporary, mode), "wb") as file:
            file.write(data)
            file.flush()
            # Do this before the rename. Otherwise a loss of power may leave an empty
            # file under the name.
            os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # The name must be on the disk as well.
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
        # Without a name, it was removed as a leftover before it was locked.
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove the unlocked temporary files of processes that were killed."""
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):  # it is locked or gone, or there are no locks
            handle = os.open(path, os.O_WRONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)

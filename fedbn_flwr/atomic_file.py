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

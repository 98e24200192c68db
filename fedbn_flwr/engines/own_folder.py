"""Temporary folders, which the next command removes if their process was killed.

A SIGKILL leaves the folder and the processes that work with it: a SuperLink for ever.
Each folder has a file that its process keeps locked, so those of a living process, and
of others, stay.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["own_folder", "remove_dead"]

_PREFIX = "fedbn-flwr-"
_MARKER = "fedbn-flwr"  # the file by which a folder of ours is told


@contextmanager
def own_folder() -> Iterator[str]:
    """Return a temporary folder for the block; remove those of killed processes."""
    remove_dead()
    with tempfile.TemporaryDirectory(
        prefix=_PREFIX, ignore_cleanup_errors=True
    ) as folder:
        new, marker = Path(folder, "new"), Path(folder, _MARKER)
        handle = os.open(new, os.O_WRONLY | os.O_CREAT)
        try:
            # Until this process ends, in whatever way. The file has its name after the
            # lock: an unlocked one would look like that of a killed process.
            fcntl.flock(handle, fcntl.LOCK_EX)
            new.rename(marker)
            yield folder
        finally:
            os.close(handle)


def remove_dead() -> None:
    """Remove the folders whose process was killed; end the processes that it left."""
    for marker in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_MARKER}"):
        with suppress(OSError):  # it is in use, another user's, or gone
            handle = os.open(marker, os.O_WRONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_processes(marker.parent)
                shutil.rmtree(marker.parent, ignore_errors=True)
            finally:
                os.close(handle)


def _end_processes(folder: Path) -> None:
    """Kill this user's processes that name this folder; none without /proc."""
    # Ray's have a path in it as an argument, Flower's have it as their home.
    path, home = f"{folder}/".encode(), f"FLWR_HOME={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            named = path in (process / "cmdline").read_bytes()
            if named or home in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)

"""Temporary folders, removed by the next command if their process was killed.

A SIGKILL leaves behind the folder and the processes that use it, such as a SuperLink
that never ends. The process of a folder keeps a file in it locked. Therefore folders of
running processes and of other programs are not removed.
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

_PREFIX = "fedbn-flwr-"
_MARKER = "fedbn-flwr"  # file that marks the package's folders


@contextmanager
def own_folder() -> Iterator[str]:
    """Yield a temporary folder for the block, and remove abandoned folders."""
    remove_dead()
    with tempfile.TemporaryDirectory(
        prefix=_PREFIX, ignore_cleanup_errors=True
    ) as folder:
        new, marker = Path(folder, "new"), Path(folder, _MARKER)
        handle = os.open(new, os.O_WRONLY | os.O_CREAT)
        try:
            # The lock lasts until the process ends, even if the process is killed. Lock
            # the file before it gets its name, because an unlocked file of this name
            # would look abandoned.
            fcntl.flock(handle, fcntl.LOCK_EX)
            new.rename(marker)
            yield folder
        finally:
            os.close(handle)


def remove_dead() -> None:
    """Remove the folders of killed processes, and end processes that still use them."""
    for marker in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_MARKER}"):
        with suppress(OSError):  # in use, of another user, or gone
            handle = os.open(marker, os.O_WRONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_processes(marker.parent)
                shutil.rmtree(marker.parent, ignore_errors=True)
            finally:
                os.close(handle)


def _end_processes(folder: Path) -> None:
    """Kill this user's processes that use the folder, if the system has /proc."""
    # A process of Ray has a path inside the folder as an argument. A process of Flower
    # has the folder as its FLWR_HOME.
    path, home = f"{folder}/".encode(), f"FLWR_HOME={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or has another user
            named = path in (process / "cmdline").read_bytes()
            if named or home in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)

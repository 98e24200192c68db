"""The open files of this process, to see that none stays open."""

import gc
import os
from contextlib import suppress
from pathlib import Path


def open_files() -> set[tuple[str, str]]:
    """Return each descriptor with its file.

    What other tests left open may be closed at any time, so compare sets: no new
    member.
    """
    gc.collect()
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own descriptor
            found.add((descriptor.name, os.readlink(descriptor)))
    return found

"""What this process may use of its machine: cores by its affinity, cores and memory by its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["memory_bytes", "num_cores"]

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def num_cores() -> int:
    """Return how many cores this process may keep busy; a batch system or a container may leave it a part of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for limit in _limits("cpu.max"):
        quota, _, period = limit.partition(" ")
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def memory_bytes() -> int:
    """Return the memory that this process may have, in bytes: the machine's, or that of its container."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *map(int, _limits("memory.max"))])


def _limits(name: str) -> Iterator[str]:
    """Yield a limit of this process's control group and of those above it (version 2), where there is one."""
    try:
        own = next(line for line in _OWN.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    group = _GROUPS / own.removeprefix("0::").strip("/")
    for folder in (group, *group.parents):
        try:
            limit = (folder / name).read_text().strip()
        except OSError:  # the root has none; in a container the path may be that of the host
            limit = "max"
        if not limit.startswith("max"):
            yield limit
        if folder == _GROUPS:
            return

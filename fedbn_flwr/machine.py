"""What this process may use of its machine, and what the machine can do."""

from __future__ import annotations

import ctypes
import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "begin_fork",
    "forking",
    "has_bfloat16",
    "keep_freed_memory",
    "memory_bytes",
    "num_cores",
    "threads",
]

_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1  # of mallopt(3)
_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def num_cores() -> int:
    """Return how many cores this process may keep busy."""
    # A batch system pins it to some of them, a container gives it a share of the time.
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for limit in _limits("cpu.max"):
        quota, _, period = limit.partition(" ")
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def memory_bytes() -> int:
    """Return the bytes that this process may have: the machine's or its container's."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *map(int, _limits("memory.max"))])


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions for bfloat16.

    Without them it is emulated, several times slower. On a CPU torch's convolutions and
    matrix products then take loops of their own in place of oneDNN's kernels.
    """
    import torch  # the command line, which also begins here, answers without it

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # a build without oneDNN has none
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(supported and supported())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads in the block.

    One is faster where operations are small and many, or where the caller has threads
    of its own.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def forking() -> Iterator[None]:
    """Let the block fork this process; the fork calls ``begin_fork`` first."""
    # No collection in the fork until then, see there.
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # of forks beside threads, which our forks do not use
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if collects:
            gc.enable()


def begin_fork() -> None:
    """Collect garbage in this process, a fork, but none that it has inherited.

    To end a native object (a channel, a session) may need threads that its library has
    in the parent alone: a worker was ended by SIGSEGV in a collection.
    """
    gc.freeze()
    gc.enable()


def keep_freed_memory() -> None:
    """Let this process keep the memory that it has freed, for its next tensors; for
    processes of this package only.

    A training step frees some hundred megabytes, and the next one needs them again.
    glibc gives them back to the system in between, most of all in threads, which have
    pools of their own: getting them page by page takes up to a tenth of a step's time.
    The process then holds the most that it has needed so far. Without effect under
    another C library, and where the environment has such settings itself
    (``MALLOC_ARENA_MAX``, ``GLIBC_TUNABLES``, ...).
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, 2**25)  # the most that glibc takes
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def _limits(name: str) -> Iterator[str]:
    """Yield a limit of this process's control group (version 2) and of those above."""
    # The line of version 2 is "0::/path/of/the/group"; other systems have none.
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    paths = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    if not paths:
        return
    group = _GROUPS / paths[0].strip("/")
    # The smallest limit counts, at whatever height it is.
    for folder in (group, *group.parents):
        try:
            limit = (folder / name).read_text().strip()
        # the root has none; in a container the path may be that of the host
        except OSError:
            limit = "max"
        if not limit.startswith("max"):
            yield limit
        if folder == _GROUPS:
            return

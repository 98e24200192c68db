"""The resources of the machine that this process may use, and its capabilities."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from logging import Logger
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1  # options of mallopt(3)
_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_OPEN = Path("/proc/self/fd")
# The folders of Python, of installed packages and of this package.
_LIBRARIES = sys.prefix, sys.base_prefix, str(Path(__file__).parent)

# Flags and position of each file that was open at the fork, by descriptor. A fork
# inherits the value, but a new process has no value.
_FILES = ContextVar[dict[int, tuple[int, int, int]]]("files")


def num_cores() -> int:
    """Return the number of cores that this process may keep busy."""
    # A batch system pins the process to some cores, a container limits its CPU time.
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for limit in _limits("cpu.max"):
        quota, _, period = limit.partition(" ")
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions for bfloat16.

    Without such instructions, bfloat16 is emulated and several times slower. On a CPU,
    torch's convolutions and matrix products then use their own loops instead of
    oneDNN's kernels.
    """
    import torch  # imported here, because the command line also needs this module

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # A build of torch without oneDNN has no such function.
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(supported and supported())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use this number of threads in the block.

    One thread is faster if operations are many and small, or if the caller uses threads
    itself.
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
    """Let the block fork this process. The fork must call ``begin_fork`` first."""
    # Save the positions now, because this process moves them after the fork.
    before = _FILES.set(_open_files())
    # Prevent garbage collection in the fork until it calls ``begin_fork``.
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # Ignore warnings about forks with threads, because our forks do not use the
            # threads of this process.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        _FILES.reset(before)
        if collects:
            gc.enable()


def begin_fork() -> None:
    """Separate this process, a fork, from its parent.

    The parent and its forks have one position in each file that was open at the fork. A
    data set would read other rows if another process moved the position in between. So
    open these files again. This works for each object that reads a file, also in C.

    Garbage is collected, but never inherited objects. The deletion of a native object
    (a channel, a session) may need threads of its library that exist only in the
    parent, and could end this process by SIGSEGV.
    """
    gc.freeze()
    gc.enable()
    for descriptor, (flags, position, first) in _FILES.get({}).items():
        # A library may have closed its file, when it noticed the fork.
        with suppress(FileNotFoundError):
            if first != descriptor:
                os.dup2(first, descriptor, os.get_inheritable(descriptor))
                continue
            # The link leads to the file itself, even if it was renamed or deleted.
            own = os.open(_OPEN / str(descriptor), flags)
            os.lseek(own, position, os.SEEK_SET)
            os.dup2(own, descriptor, os.get_inheritable(descriptor))
            os.close(own)


def _open_files() -> dict[int, tuple[int, int, int]]:
    """Return flags and position of each open regular file that this process can read.

    The third number is the first descriptor that shares its position (``os.dup``).
    Files that are only written keep a common position, so that the lines of several
    processes follow each other in a log. So do the standard streams, 0 to 2.
    """
    found: dict[int, tuple[int, int, int]] = {}
    for descriptor in sorted(int(path.name) for path in _OPEN.glob("*")):
        path = _OPEN / str(descriptor)
        with suppress(OSError):  # the descriptor of this listing is closed again
            _, position, _, flags, *_ = (
                Path(f"{_OPEN}info", path.name).read_text().split()
            )
            # The other flags concern the path and the speed.
            kept = int(flags, 8) & (os.O_ACCMODE | os.O_APPEND)
            if path.is_file() and descriptor > 2 and not kept & os.O_WRONLY:
                about = kept, int(position)
                first = descriptor
                for other, (*its, common) in found.items():
                    if about == (*its,) and _share_position(other, descriptor):
                        first = common
                        break
                found[descriptor] = *about, first
    return found


def _share_position(one: int, other: int) -> bool:
    """Return whether two descriptors at one position have it in common."""
    if not os.path.sameopenfile(one, other):
        return False
    # No call of the system says so: move one, and look at the other.
    position = os.lseek(one, 0, os.SEEK_CUR)
    os.lseek(one, position + 1, os.SEEK_SET)
    moved = os.lseek(other, 0, os.SEEK_CUR) != position
    os.lseek(one, position, os.SEEK_SET)
    return moved


def not_for_forks(root: object) -> str:
    """Return a text about a connection or a pipe that an object has, or "".

    A fork cannot open it again. The search follows attributes, elements and closures,
    and in users' modules the classes and the global objects that functions name.
    """
    seen, left = set[int](), [root]
    while left:
        each: Any = left.pop()
        # Most elements of a large list are numbers and texts.
        if id(each) in seen or not gc.is_tracked(each):
            continue
        seen.add(id(each))
        with suppress(Exception):  # it has no descriptor, or is closed
            path = _OPEN / str(each.fileno())
            if each.fileno() > 2 and (path.is_socket() or path.is_fifo()):
                return (
                    f"the clients use an object of class {type(each).__qualname__}, and"
                    " processes cannot share a connection or a pipe. Open it at its"
                    " first use in each process (os.getpid())"
                )
        left += _referents(each)
    return ""


def _referents(value: Any) -> list[Any]:
    # These lead to the whole program.
    if isinstance(value, ModuleType | Logger | FrameType):
        return []
    if not isinstance(value, FunctionType | type):
        return gc.get_referents(value)
    file = getattr(sys.modules.get(value.__module__), "__file__", "")
    is_library = str(file).startswith(_LIBRARIES)
    if isinstance(value, type):
        return [] if is_library else gc.get_referents(value)
    names = () if is_library else value.__code__.co_names
    found = map(value.__globals__.get, names)
    return [value.__closure__, value.__defaults__, *found]


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next tensors.

    Use it only at the start of this package's own processes. A training step frees some
    hundred megabytes, and the next step needs them again. By default, glibc returns
    this memory to the system in between, most of all in threads, because threads have
    their own pools. Getting memory page by page takes up to a tenth of a step's time.
    With this setting the process keeps all memory that it has needed so far. The
    setting has no effect with another C library, or if the environment has such
    settings (``MALLOC_TRIM_THRESHOLD_``, ``GLIBC_TUNABLES``, ...).
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, 2**25)  # the largest value that glibc accepts
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def _limits(name: str) -> Iterator[str]:
    """Yield the limits of this process's control group (version 2) and its parents."""
    # The line of version 2 is "0::/path/of/the/group". Other systems have no such line.
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    paths = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    if not paths:
        return
    group = _GROUPS / paths[0].strip("/")
    # The smallest limit in the tree counts, so yield the limit of each level.
    for folder in (group, *group.parents):
        try:
            limit = (folder / name).read_text().strip()
        # The root group has no limit. In a container, the path may belong to the host.
        except OSError:
            limit = "max"
        if not limit.startswith("max"):
            yield limit
        if folder == _GROUPS:
            return

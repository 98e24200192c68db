"""A Ray cluster of two nodes on this machine.

The second node does not see some folders of the first.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import fedbn_flwr
from fedbn_flwr.engines.flower_run import BIN, Process, free_port

_SECONDS = 120


def can_hide() -> bool:
    """Return whether a process may have mounts of its own."""
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(
            ["unshare", "-m", "true"], capture_output=True, check=False
        ).returncode
    )


def without(folders: Sequence[Path], command: Sequence[str]) -> list[str]:
    """Return the command with these folders empty, as on another machine."""
    empty = [f"mount -t tmpfs none {shlex.quote(str(folder))}" for folder in folders]
    return [
        "unshare",
        "-m",
        "sh",
        "-c",
        " && ".join([*empty, f"exec {shlex.join(command)}"]),
    ]


@contextmanager
def two_nodes(scratch: Path, hidden: Sequence[Path], cpus: int = 1) -> Iterator[str]:
    """Yield the address of a cluster of two nodes, each with ``cpus`` CPUs.

    If the system permits it, the second node has neither this package nor the folders
    ``hidden``.
    """
    with ExitStack() as stack:
        address = stack.enter_context(
            _node("head", scratch, [], ["--head", "--include-dashboard=false"], cpus)
        )
        folders = (
            [Path(fedbn_flwr.__file__).parent, *hidden, scratch / "head"]
            if can_hide()
            else []
        )
        stack.enter_context(
            _node("second", scratch, folders, [f"--address={address}"], cpus)
        )
        yield address


@contextmanager
def _node(
    name: str,
    scratch: Path,
    hidden: Sequence[Path],
    options: Sequence[str],
    cpus: int,
    host: str = "127.0.0.1",
) -> Iterator[str]:
    port, home = free_port(), scratch / f"{name}-home"
    home.mkdir()
    where = (
        [f"--port={port}", f"--temp-dir={scratch / 'head'}"]
        if "--head" in options
        else []
    )
    command = [
        str(BIN / "ray"),
        "start",
        "--block",
        f"--node-ip-address={host}",
        f"--num-cpus={cpus}",
        *options,
        *where,
    ]
    command += [
        "--object-store-memory=100000000",
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]
    (scratch / "head").mkdir(exist_ok=True)
    process = Process(
        without(hidden, command) if hidden else command,
        _environment(scratch),
        scratch / f"{name}.log",
        home,
    )
    try:
        deadline = time.monotonic() + _SECONDS
        while "Ray runtime started" not in process.said():
            assert process.code is None, process.said()
            assert time.monotonic() < deadline, process.said()
            time.sleep(0.1)
        yield f"{host}:{port}"
    finally:
        process.kill()


def _environment(scratch: Path) -> Mapping[str, str]:
    """Return the environment of a machine without the driver's settings."""
    mine = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "RAY_ADDRESS", "FLWR_HOME")
    }
    return {
        **mine,
        "TMPDIR": str(scratch),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }

"""Cores and memory are the machine's, or the limits of its control groups.

Freed memory is kept.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from fedbn_flwr import machine
from fedbn_flwr.machine import begin_fork, forking, num_cores


@pytest.mark.parametrize(
    ("outer", "inner", "cores"),
    [
        ("max 100000", "max", 64),
        ("350000 100000", "max 100000", 3),
        ("max", "50000 100000", 1),
    ],
)
def test_the_smallest_limit_of_the_groups_counts(
    outer: str, inner: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "fs/slurm/job"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("1:name=systemd:/x\n0::/slurm/job\n")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "fs")
    monkeypatch.setattr(machine, "_OWN", tmp_path / "own")
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(range(64)), raising=False
    )
    assert num_cores() == 64, "no limit is written anywhere"
    (group.parent / "cpu.max").write_text(f"{outer}\n")
    (group / "cpu.max").write_text(f"{inner}\n")
    assert num_cores() == cores
    (tmp_path / "own").unlink()
    assert num_cores() == 64, "control groups do not exist"


_FREES = """
import resource, threading, torch
from fedbn_flwr.machine import keep_freed_memory

faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step() -> None:
    for size in (2**18, 2**21, 2**22):
        held = [torch.ones(size) for _ in range(2**22 // size)]

def steps() -> None:
    step(), step()
    before = faults()
    for _ in range(4):
        step()
    print(faults() - before)

for call in (int, keep_freed_memory):
    call()
    thread = threading.Thread(target=steps)
    thread.start(), thread.join()
"""


def _page_faults(**environment: str) -> list[int]:
    """Return the page faults of a thread before and after a call.

    The thread frees and needs tens of megabytes.
    """
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    code, said = (
        [sys.executable, "-c", _FREES],
        {"capture_output": True, "text": True, "check": True},
    )
    return [
        int(line)
        for line in subprocess.run(
            code, env={**own, **environment}, **said
        ).stdout.split()
    ]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.slow
def test_freed_memory_is_kept_unless_the_environment_sets_it() -> None:
    without, kept = _page_faults()
    assert 4 * kept < without
    _, of_the_environment = _page_faults(MALLOC_TRIM_THRESHOLD_="100000")
    assert 4 * kept < of_the_environment


def test_a_fork_reads_at_its_own_positions_and_writes_at_common_ones(
    tmp_path: Path,
) -> None:
    (tmp_path / "table").write_bytes(bytes(range(9)))
    closed = (tmp_path / "table").open("rb")
    modes = {"table": "rb", "log": "wb", "notes": "a+b"}
    table, log, notes = (
        (tmp_path / name).open(mode, 0) for name, mode in modes.items()
    )
    table.seek(4)
    waits, goes = os.pipe()
    with forking():
        fork = os.fork()
        if not fork:
            os.read(waits, 1)
            closed.close()
            begin_fork()
            log.write(table.read(2))
            notes.write(b"fork")
            os._exit(0)
    table.seek(7)
    log.write(b"first")
    notes.write(b"first")
    os.write(goes, b".")
    os.waitpid(fork, 0)
    assert (table.tell(), log.tell()) == (7, 7)
    assert (tmp_path / "log").read_bytes() == b"first" + bytes([4, 5])
    assert (tmp_path / "notes").read_bytes() == b"firstfork"

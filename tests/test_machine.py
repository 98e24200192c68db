"""Cores and memory are the machine's, or the limits of its control groups.

Freed memory is kept.
"""

from __future__ import annotations

import os
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

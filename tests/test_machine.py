"""Cores and memory: those of the machine, or what the control groups of this process leave of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedbn_flwr import machine
from fedbn_flwr.machine import memory_bytes, num_cores


@pytest.mark.parametrize(
    ("outer", "inner", "cores"),
    [("max 100000", "max", 64), ("350000 100000", "max 100000", 3), ("max", "50000 100000", 1)],
)
def test_the_smallest_limit_of_the_groups_counts(
    outer: str, inner: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "fs/slurm/job"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("1:name=systemd:/x\n0::/slurm/job\n")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "fs")
    monkeypatch.setattr(machine, "_OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert (num_cores(), memory_bytes()) == (64, whole), "no limit is written anywhere"
    (group.parent / "cpu.max").write_text(f"{outer}\n")
    (group / "cpu.max").write_text(f"{inner}\n")
    (group.parent / "memory.max").write_text("max\n" if cores == 64 else "1048576\n")
    assert (num_cores(), memory_bytes()) == (cores, whole if cores == 64 else 2**20)
    (tmp_path / "own").unlink()
    assert num_cores() == 64, "there are no control groups"

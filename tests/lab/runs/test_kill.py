"""SIGKILL ends a sweep with all its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.support.runs import lines_of, summary_of

SWEEP = """
import os, sys
from pathlib import Path

os.setpgrp()
study, out, group = map(Path, sys.argv[1:])
group.write_text(str(os.getpid()))

from fedbn_flwr.lab.runs import run
from fedbn_flwr.lab.studies.check_study import load_study
from fedbn_flwr.lab.studies.sweep import sweep

os.fsync = lambda handle: None  # a kill loses nothing that was written; a power cut is not meant here
run.default_workers = lambda config: 2
sweep(load_study(study), out)
"""
TABLES = ("results.csv", "table.md", "study.yaml")


def members(group: int) -> list[int]:
    """Return the processes of a group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = path.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:  # it ended meanwhile
            continue
        if int(of) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


def await_that(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_sweep_that_was_killed_has_the_tables_of_one_that_was_not(
    at_once: dict[str, str], tmp_path: Path
) -> None:
    base = {"num-clients": 3, "local-steps": 1, "batch-size": 8, "learning-rate": 0.1}
    base |= {"eval-every": 10, "num-server-rounds": 20, "checkpoint-every": 5}
    content = {
        "name": "killed",
        "base": base,
        "seeds": [0],
        "target": 20,
        "paper": {"FixBN/all": 50},
        "methods": {"FixBN": {"strategy": "fixbn", "freeze-at": 0.5}},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))

    def start(out: Path) -> subprocess.Popen[bytes]:
        paths = (tmp_path / "study.yaml", out, tmp_path / "group")
        paths[-1].unlink(missing_ok=True)
        return subprocess.Popen(
            ["python", "-c", SWEEP, *map(str, paths)],
            env=at_once,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait(60) == 0
    process, run = start(killed), killed / "FixBN/all/seed-0"
    await_that(lambda: len(lines_of(run)) > 6)
    pid = int((tmp_path / "group").read_text())
    assert len(members(pid)) == 3, "the sweep and the workers of its run"
    os.killpg(pid, signal.SIGKILL)
    await_that(lambda: not members(pid))
    assert process.wait(60) != 0
    assert start(killed).wait(60) == 0
    assert "resumed-after" in summary_of(run)
    for name in TABLES:
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name

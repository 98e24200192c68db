"""SIGKILL ends a sweep with all its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.fast import fast
from tests.support.runs import lines_of

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


METHODS = {
    "FixBN": {"strategy": "fixbn", "freeze-at": 0.5},
    "FedBN": {"strategy": "fedbn"},
}


@pytest.mark.parametrize("kills", fast([1, len(METHODS)], 0))
def test_a_sweep_that_was_killed_has_the_tables_of_one_that_was_not(
    kills: int, at_once: dict[str, str], tmp_path: Path
) -> None:
    methods = dict(list(METHODS.items())[:kills])
    base = {
        "num-clients": 3,
        "local-steps": 1,
        "batch-size": 8,
        "learning-rate": 0.1,
        "eval-every": 10,
    }
    base |= {"num-server-rounds": 20, "checkpoint-every": 5}
    content = {
        "name": "killed",
        "base": base,
        "seeds": [0],
        "target": 20,
        "paper": {"FixBN/all": 50},
        "methods": methods,
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))

    def start(out: Path) -> tuple[subprocess.Popen[bytes], Path]:
        group = tmp_path / "group"
        group.unlink(missing_ok=True)
        command = [
            "python",
            "-c",
            SWEEP,
            str(tmp_path / "study.yaml"),
            str(out),
            str(group),
        ]
        return (
            subprocess.Popen(
                command,
                env=at_once,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ),
            group,
        )

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole)[0].wait(60) == 0
    for run in [f"{name}/all/seed-0" for name in methods]:
        process, group = start(killed)
        await_that(lambda run=run: len(lines_of(killed / run)) > 6)
        pid = int(group.read_text())
        assert len(members(pid)) == 3, "the sweep and the workers of its run"
        os.killpg(pid, signal.SIGKILL)
        await_that(lambda pid=pid: not members(pid))
        assert process.wait(60) != 0
    assert start(killed)[0].wait(60) == 0
    resumed = [
        path.parent.parent.parent.name
        for path in killed.rglob("summary.json")
        if "resumed-after" in path.read_text()
    ]
    assert sorted(resumed) == sorted(methods)
    for name in TABLES:
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name

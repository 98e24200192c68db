"""SIGKILL ends a sweep with all its processes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from fedbn_flwr.lab.studies.sweep import sweep
from tests.support.runs import summary_of
from tests.support.studies import load

SWEEP = """
import os, signal, sys
from pathlib import Path

os.setpgrp()
study, out, group = map(Path, sys.argv[1:])

from fedbn_flwr.lab.results.folder import RunFolder
from fedbn_flwr.lab.runs import run
from fedbn_flwr.lab.studies.check_study import load_study
from fedbn_flwr.lab.studies.sweep import sweep

append = RunFolder.append

def killed(folder, name, line):
    append(folder, name, line)
    if line["round"] == 7:
        group.write_text(str(os.getpid()))
        os.killpg(0, signal.SIGKILL)

RunFolder.append = killed
run.default_workers = lambda config: 2
sweep(load_study(study), out)
"""
STUDY = """
name: killed
base:
  {num-clients: 3, local-steps: 1, batch-size: 8, learning-rate: 0.1}
overrides:
  FixBN/all: {eval-every: 10, num-server-rounds: 20, checkpoint-every: 5}
methods: {FixBN: {strategy: fixbn, freeze-at: 0.5}}
paper: {FixBN/all: 50}
"""


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


def test_a_sweep_that_was_killed_has_the_tables_of_one_that_was_not(
    at_once, tmp_path
) -> None:
    study = load(tmp_path, STUDY)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    sweep(study, whole)
    paths = (tmp_path / "study.yaml", killed, tmp_path / "group")
    command = ["python", "-c", SWEEP, *map(str, paths)]
    done = subprocess.run(command, env=at_once, capture_output=True, check=False)
    assert done.returncode != 0
    group, deadline = int(paths[-1].read_text()), time.monotonic() + 60
    while members(group):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sweep(study, killed)
    assert summary_of(killed / "FixBN/all/seed-0")["resumed-after"] == [5]
    for name in ("results.csv", "table.md", "study.yaml"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name

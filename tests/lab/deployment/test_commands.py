"""The commands ``make federation-up``, ``federation-run`` and ``federation-down``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.xdist_group("network")]

ROOT = Path(__file__).parents[3]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    made = [sys.executable, "-m", "fedbn_flwr.lab.deployment", *words]
    return subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=False)


def test_up_run_and_down(scratch: Path) -> None:
    where = ["--folder", str(scratch / "federation")]
    assert "no federation in" in command("run", "", *where).stderr
    try:
        up = command("up", "--nodes", "2", *where)
        assert up.returncode == 0, up.stderr
        assert "2 nodes are online" in up.stdout
        again = command("up", *where)
        assert (again.returncode, "`make federation-down` ends it" in again.stderr) == (1, True)

        settings = f"num-server-rounds=1 local-steps=1 num-clients=2 out='{scratch}/out'"
        run = command("run", settings, *where)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "finished:completed" in run.stdout
        assert json.loads((scratch / "out/summary.json").read_text())["rounds"] == 1
        failed = command("run", settings, *where)  # the folder is in use
        assert failed.returncode == 1
        assert "finished:failed" in failed.stdout

        pids = [
            int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and is_superexec(path, scratch)
        ]
        assert len(pids) == 3
        os.kill(pids[0], 9)
        log = scratch / "federation/supervisor.log"
        deadline = time.monotonic() + 30
        while "ended and was restarted" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        down = command("down", *where)
    assert down.returncode == 0, down.stderr
    assert "no process of the federation is running" in down.stdout
    assert command("down", *where).returncode == 0, "and again"

    try:  # the folder's keys and state are used again; a supervisor that is killed leaves its services behind
        up = command("up", "--nodes", "1", *where)
        assert up.returncode == 0, up.stderr
        os.kill(int((scratch / "federation/supervisor.pid").read_text()), 9)
        up = command("up", "--nodes", "2", *where)
        assert (up.returncode, "`make federation-down` ends it" in up.stderr) == (1, True)
        down = command("down", *where)
        assert down.returncode == 0, down.stderr
        too_many = command("up", "--nodes", "3", *where)
        assert (too_many.returncode, "has keys for 2 nodes, but 3 are asked for" in too_many.stderr) == (1, True)
        up = command("up", "--nodes", "2", *where)  # the killed node is refused for a while, and held for online
        assert up.returncode == 0, up.stderr
        assert log.read_text() == "", "nothing had to be started again after it was up"
    finally:
        down = command("down", *where)
    assert down.returncode == 0, down.stderr
    assert not [path for path in Path("/proc").iterdir() if path.name.isdigit() and is_superexec(path, scratch)]


def is_superexec(process: Path, scratch: Path) -> bool:
    try:
        line = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return b"flower-superexec" in line and str(scratch).encode() in line

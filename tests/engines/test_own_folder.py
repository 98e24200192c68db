"""The next command removes the folders of a killed process and its SuperLink."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedbn_flwr.engines.own_folder import own_folder

KILLED = """
import subprocess
from pathlib import Path
from fedbn_flwr.engines.flower_run import Process, flower_environment
from fedbn_flwr.engines.own_folder import own_folder

with own_folder() as home:
    service = Process(["sleep", "600"], flower_environment(Path(home)), Path(home, "log"))
    print(service.pid, home, flush=True)
    input()
"""


def waited(condition: Callable[[], bool]) -> bool:
    for _ in range(100):
        if condition():
            return True
        time.sleep(0.1)
    return False


def ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_the_processes_and_the_folder_of_a_killed_command_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with Flower's home in the folder survives in its own session."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    others = tmp_path / "fedbn-flwr-others"
    others.mkdir()
    bystander = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, "FLWR_HOME": str(others)}
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=-1, stdout=subprocess.PIPE, text=True
    )
    try:
        assert killed.stdout
        pid, home = killed.stdout.readline().split()
        with own_folder():
            assert Path(home).exists()
            assert not ended(int(pid))
        killed.kill()
        killed.wait()
        assert not ended(int(pid)), "nobody ends it"
        with own_folder() as own:
            assert Path(own).exists()
            assert waited(lambda: ended(int(pid)))
            assert not Path(home).exists()
        assert others.exists()
        assert bystander.poll() is None
        assert not Path(own).exists()
    finally:
        for process in (bystander, killed):
            process.kill()
            process.communicate()

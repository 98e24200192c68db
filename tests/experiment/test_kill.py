"""A few of the kills of ``benchmarks/kill_and_resume.py``: real processes, SIGKILL, the same SHA-256 after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/kill_and_resume.py"


def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    options = ["--methods", "scaffold", "--kills", "3", "--rounds", "8", "--every", "2"]
    env = {**os.environ, "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    assert [(row[0], row[2], row[6]) for row in rows] == [("scaffold", "3", "yes")]
    assert all(int(row[3]) > 0 for row in rows), "none was resumed from a checkpoint"

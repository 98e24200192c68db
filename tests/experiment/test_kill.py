"""A few of the kills of ``benchmarks/kill_and_resume.py``: real processes, SIGKILL, the same SHA-256 after."""

from __future__ import annotations

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/kill_and_resume.py"


def test_a_killed_run_resumes_to_the_same_bits(at_once: dict[str, str]) -> None:
    options = ["--methods", "scaffold", "--kills", "3", "--rounds", "8", "--every", "2"]
    command = ["python", str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=at_once)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    assert [(row[0], row[2], row[6]) for row in rows] == [("scaffold", "3", "yes")]
    assert all(int(row[3]) > 0 for row in rows), "none was resumed from a checkpoint"

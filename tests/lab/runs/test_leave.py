"""A run that a signal ends during a round saves its last whole round.

It continues from there to the same bits.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

from tests.support.options import set_options
from tests.support.runs import lines_of

SETTINGS = {
    "num-clients": 2,
    "local-steps": 1,
    "batch-size": 8,
    "strategy": "fedbn",
    "num-server-rounds": 5000,
    "checkpoint-every": 4000,
}
COMMAND = """
import os
from pathlib import Path

os.setpgrp()
Path("group").write_text(str(os.getpid()))

from fedbn_flwr.lab.cli import app
app()
"""


def test_a_real_signal_to_all_processes_of_a_command(at_once, tmp_path) -> None:
    """A batch system sends it to all, and the command reports the saved round.

    tests/lab/test_cli.py has Ctrl-C.
    """
    out = tmp_path / "out"
    words = [*set_options(SETTINGS), "--workers=2", "--out", str(out)]
    started = subprocess.Popen(
        ["python", "-c", COMMAND, "run", *words],
        env=at_once,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    deadline = time.monotonic() + 100
    while len(lines_of(out)) < 3:
        assert time.monotonic() < deadline
        assert started.poll() is None
        time.sleep(0.02)
    os.killpg(int((tmp_path / "group").read_text()), signal.SIGTERM)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 143, said
    assert "INFO" not in said, "Flower's log of every round"
    assert re.search(r"^round 2/5000: loss \d\.\d{4}", said, re.MULTILINE)
    last = max(path.stem for path in (out / "checkpoint").glob("round-*.safetensors"))
    written = lines_of(out)[-1]["round"]
    # The signal may come between line and checkpoint.
    assert written - int(last.removeprefix("round-")) in (0, 1)
    saved = f"the results of round {written} of 5000, and a checkpoint of round "
    assert f"interrupted. Saved in {out}: {saved}" in said
    assert f"Continue with: fedbn-flwr run --out {out} --workers 2 --resume" in said

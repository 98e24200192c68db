"""SIGKILL while a run writes its tables of tests and of predictions."""

from __future__ import annotations

import signal
import subprocess

import numpy as np
import pytest
import yaml

from fedbn_flwr.lab.results.files import PREDICTIONS_FILES
from tests.support.fast import fast

# The process ends itself in the second write of tests after its start, when a drawn
# share of the bytes is in the file.
KILLED = """
import os, signal, sys
from pathlib import Path

config, out, share = sys.argv[1:]

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.results import predictions
from fedbn_flwr.lab.runs.run import run

write, writes = os.write, 0

def torn(handle, data):
    global writes
    if os.readlink(f"/proc/self/fd/{handle}").endswith("/tests.csv"):
        writes += 1
        if writes == 2:
            write(handle, data[:int(float(share) * len(data))])
            os.kill(os.getpid(), signal.SIGKILL)
    return write(handle, data)

def ended(path, text, mode):
    Path(path).with_suffix(".part").write_text(text[:99])
    os.kill(os.getpid(), signal.SIGKILL)

os.fsync = lambda handle: None  # a kill loses nothing that was written; a power cut is not meant here
if share == "predictions":
    predictions.write_atomically = ended
elif share:
    os.write = torn
settings = Config.load(Path(config)).to_mapping() | {"resume": True}
run(Config.make(settings, complete=True), Path(out), workers=0)
"""


@pytest.mark.parametrize("kills", fast([2, 20], 0))
def test_kills_in_the_middle_of_a_round_lose_nothing_and_double_nothing(
    kills: int, at_once, tmp_path
) -> None:
    draw = np.random.default_rng(kills)
    settings = {"num-clients": 3, "num-server-rounds": kills + 2, "local-steps": 1}
    settings |= {"batch-size": 8, "checkpoint-every": 1}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings | {"eval-on": "personal-own,global"}))

    def ended(out: str, share: float | str = "") -> int:
        command = ["python", "-c", KILLED, str(config), str(tmp_path / out), str(share)]
        done = subprocess.run(command, env=at_once, capture_output=True, timeout=120)
        return done.returncode

    assert ended("whole") == 0
    for _ in range(kills):
        assert ended("killed", draw.random()) % 256 == 256 - signal.SIGKILL
    assert ended("killed", "predictions") % 256 == 256 - signal.SIGKILL
    assert not (tmp_path / "killed/summary.json").exists(), "the run is not finished"
    assert ended("killed") == 0
    for name in ("tests.csv", *PREDICTIONS_FILES):
        killed, whole = (tmp_path / out / name for out in ("killed", "whole"))
        assert killed.read_text() == whole.read_text()
    tests = (tmp_path / "whole/tests.csv").read_text()
    assert tests.count("\n1,") == tests.count(f"\n{kills},") > 0

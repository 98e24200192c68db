"""A run that a signal ends in mid-round saves its last whole round, and goes on from there to the same bits."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.client import torch_client
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.runs import centralized
from fedbn_flwr.lab.runs.run import run

SETTINGS: dict[str, Any] = {"num-clients": 2, "num-server-rounds": 4, "local-steps": 1, "batch-size": 8}
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from fedbn_flwr.lab.cli import app
app()
"""
METHODS: dict[str, dict[str, Any]] = {
    "fedbn": {},
    "scaffold": {},
    "fixbn": {"freeze-at": 3},
    "fedtan": {},
    "fedavgm": {},
    "fedbs": {},
    "centralized": {"sgd-momentum": 0.9},
}


def checkpoints(out: Path) -> list[str]:
    return sorted(path.stem for path in (out / "checkpoint").glob("round-*.safetensors"))


def sha256(out: Path) -> str:
    return json.loads((out / "summary.json").read_text())["sha256"]


def press_in_round_3(strategy: str, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second client's training of round 3, when the first client has written its part of that round."""
    module, at = (centralized, 3) if strategy == "centralized" else (torch_client, 6)
    plain, calls = module.train, itertools.count(1)

    def train(*args: Any, **options: Any) -> Any:
        if next(calls) == at:
            signal.raise_signal(signal.SIGINT)  # for the main thread: clients have threads of their own
            time.sleep(0.3)
        return plain(*args, **options)

    patch.setattr(module, "train", train)


@pytest.fixture(autouse=True)
def _unignored() -> Iterator[None]:
    """Ctrl-C raises: xdist's processes, and those of a shell's job, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("strategy", METHODS)
def test_the_last_whole_round_is_saved_and_continued_to_the_same_bits(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.make({**SETTINGS, **METHODS[strategy], "strategy": strategy, "checkpoint-every": 100})
    run(config, tmp_path / "whole", workers=0)
    with monkeypatch.context() as patch:
        press_in_round_3(strategy, patch)
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "out", workers=0)
    assert [line["round"] for line in read_metrics(tmp_path / "out/metrics.jsonl")] == [1, 2]
    assert checkpoints(tmp_path / "out") == ["round-000000", "round-000002"]
    run(config.model_copy(update={"resume": True}), tmp_path / "out", workers=0)
    assert sha256(tmp_path / "out") == sha256(tmp_path / "whole")


def test_without_checkpoints_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.make({**SETTINGS, "checkpoint-every": 0})
    with monkeypatch.context() as patch:
        press_in_round_3("fedavg", patch)
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "out", workers=0)
    assert checkpoints(tmp_path / "out") == []


@pytest.mark.parametrize(("kind", "code", "workers"), [(signal.SIGTERM, 143, 2), (signal.SIGINT, 130, 0)])
def test_a_real_signal_to_all_processes_of_a_command(
    kind: signal.Signals, code: int, workers: int, at_once: dict[str, str], tmp_path: Path
) -> None:
    """As a batch system sends it; the command says what it saved."""
    out = tmp_path / "out"
    settings = {**SETTINGS, "strategy": "fedbn", "num-server-rounds": 5000, "checkpoint-every": 4000}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    started = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "run", *words, "--workers", str(workers), "--out", str(out)],
        env=at_once,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while len(read_metrics(out / "metrics.jsonl")) < 3:
        assert time.monotonic() < deadline
        assert started.poll() is None
        time.sleep(0.02)
    os.killpg(started.pid, kind)
    _, said = started.communicate(timeout=60)
    assert started.returncode == code, said
    assert "INFO" not in said, "Flower's log of every round"
    assert re.search(r"^round 2/5000: loss \d\.\d{4}.*, \d:\d\d:\d\d / .* left$", said, re.MULTILINE)
    (last, *_) = sorted(checkpoints(out), reverse=True)
    written = read_metrics(out / "metrics.jsonl")[-1]["round"]
    assert int(last.removeprefix("round-")) in (written, written - 1), "the signal may come between line and checkpoint"
    assert f"interrupted. Saved in {out}: the results of round {written} of 5000, and a checkpoint of round " in said
    assert f"Go on from there: fedbn-flwr run --out {out} --workers {workers} --resume" in said

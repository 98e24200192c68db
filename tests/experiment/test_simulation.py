"""The app through Flower's own simulation: the bits of the in-process run, true outcomes, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.engines.flower_run import flower_run
from fedbn_flwr.errors import EngineError
from fedbn_flwr.experiment.config import Config
from fedbn_flwr.experiment.launch import run
from fedbn_flwr.experiment.output import read_metrics

pytestmark = pytest.mark.simulation

ROOT = Path(__file__).parents[2]
NODES = 5
SETTINGS = {"strategy": "fedbn", "num-server-rounds": 2, "local-steps": 3, "batch-size": 16, "num-clients": NODES}


@pytest.fixture(autouse=True)
def users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of the user's that must stay empty, and a place for temporary files that names the processes of the test."""
    home, scratch = tmp_path / "home", Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))  # Ray's sockets: <= 107 bytes
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("FLWR_HOME", str(home / ".flwr"))
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)  # forget what was looked up before
    yield home
    assert list(home.rglob("*")) == [], "the user's Flower home is untouched"
    assert processes_of(scratch) == [], "nothing is left running"
    assert [path.name for path in scratch.iterdir() if path.name.startswith("fedbn-flwr")] == []
    shutil.rmtree(scratch)


def processes_of(folder: Path) -> list[str]:
    """Command lines of the running processes that know the folder by argument or environment, this one left out."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                known = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
                state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:  # it ended meanwhile
                continue
            if str(folder).encode() in known and state != "Z":
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(Config.make(SETTINGS), tmp_path_factory.mktemp("in-process") / "out")


@pytest.mark.parametrize("cpus_per_client", [2, 1], ids=["one actor", "two actors"])
def test_flwr_run_ends_in_the_bits_of_the_run_in_process(
    cpus_per_client: int, in_process: dict[str, Any], tmp_path: Path
) -> None:
    federation = {"num-supernodes": NODES, "client-resources-num-cpus": cpus_per_client, "init-args-num-cpus": 2}
    lines: list[str] = []
    out = tmp_path / "out"
    flower_run(ROOT, run_config={**SETTINGS, "out": str(out)}, federation_config=federation, on_line=lines.append)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["sha256"] == in_process["sha256"]
    assert summary["final"] == in_process["final"]
    assert summary["ledger"] == in_process["ledger"]
    assert [line["round"] for line in read_metrics(out / "metrics.jsonl")] == [1, 2]
    assert any("round 2/2: personal-own-accuracy" in line for line in lines)


def test_a_server_app_that_raised_is_an_error(tmp_path: Path) -> None:
    settings = {"strategy": "centralized", "out": str(tmp_path / "out")}
    with pytest.raises(EngineError) as caught:
        flower_run(ROOT, run_config=settings, federation_config={"num-supernodes": 2})
    said = str(caught.value)
    assert said.startswith("flwr run: finished:failed. Its last words:\n")
    assert "strategy='centralized' is a reference without clients: run it with `fedbn-flwr run --set" in said
    assert not (tmp_path / "out").exists()


def test_what_flower_refuses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught:
        flower_run(ROOT, run_config={"learning-rat": 1.0}, federation_config={"num-supernodes": 2})
    said = str(caught.value)
    assert said.startswith("flwr run: refused by Flower. Its last words:\n")
    assert "[code: 15]" in said


def test_the_simulation_engine_and_a_federation_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of ``fedbn-flwr run --engine simulation``: the app from the installed package alone."""
    from fedbn_flwr.experiment.simulation import simulate

    config = Config.make({**SETTINGS, "num-clients": 3, "out": str(tmp_path / "out")})
    with pytest.raises(EngineError, match=r"num-clients=3, but the federation has 4 node\(s\)\. In simulation add"):
        simulate(config, tmp_path / "out", federation_config={"num-supernodes": 4})
    assert not (tmp_path / "out").exists()

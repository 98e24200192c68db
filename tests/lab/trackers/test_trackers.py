"""Trackers get each round of a run once, whatever happens to them or to the run, and the run does not wait for them."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.runs.start_checks import check
from fedbn_flwr.lab.trackers import TRACKERS, delivery
from fedbn_flwr.lab.trackers.adapters import TensorBoard
from fedbn_flwr.lab.trackers.interface import group_of, name_of

LINE = {"phase": "train", "test-accuracy": 0.5, "participants": [0], "kept-previous": True, "seconds": 1.0}
DOMAINS = {"domains": {"test-accuracy": {"svhn": 0.25}}, "clients": {"0": {"own-accuracy": 1.0}}}
STATE = {"weight": np.zeros(2, np.float32)}
SMALL = {"num-clients": 2, "num-server-rounds": 4, "local-steps": 1, "checkpoint-every": 2}


class Fake:
    """A tracker in memory. ``broken`` lets its calls fail, ``gate`` lets them wait."""

    key = "wandb"
    module = "json"
    rounds: ClassVar[list[tuple[int, Mapping[str, float]]]]
    ends: ClassVar[list[Any]]
    broken: ClassVar[bool]
    gate: ClassVar[threading.Event]

    def __init__(self, config: Config, folder: Path, after: int) -> None:
        pass

    @staticmethod
    def problem(config: Config) -> str:
        return ""

    def open(self) -> int:
        self._call()
        return max((number for number, _ in self.rounds), default=0)

    def add_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        self._call()
        self.rounds.append((server_round, numbers))

    def close(self, summary: Mapping[str, float | str] | None) -> None:
        self._call()
        self.ends.append(summary)

    def _call(self) -> None:
        self.gate.wait()
        if self.broken:
            raise ConnectionError("no route to host")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.rounds, Fake.ends, Fake.broken, Fake.gate = [], [], False, threading.Event()
    Fake.gate.set()
    monkeypatch.setitem(TRACKERS, "wandb", Fake)
    return Fake


def test_each_round_once_also_after_a_kill_and_a_resume(tmp_path: Path, fake: type[Fake]) -> None:
    config, out = Config.make({**SMALL, "wandb": "project"}), tmp_path / "run"

    def killed(line: Mapping[str, Any]) -> None:
        if line["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, out, on_round=killed, workers=0)
    assert [number for number, _ in fake.rounds] == [1, 2, 3]
    assert fake.ends == [None]
    summary = run(config.model_copy(update={"resume": True}), out, workers=0)
    lines = read_metrics(out / "metrics.jsonl")
    assert [number for number, _ in fake.rounds] == [line["round"] for line in lines] == [1, 2, 3, 4]
    for line, (_, numbers) in zip(lines, fake.rounds, strict=True):
        assert numbers["test-accuracy"] == line["test-accuracy"]
    end = fake.ends[-1]
    assert end["final/test-accuracy"] == summary["final"]["test-accuracy"]
    assert (end["sha256"], end["ledger/exchanges"]) == (summary["sha256"], 4)


def test_a_resumed_run_sends_what_the_tracker_lacks(tmp_path: Path, fake: type[Fake]) -> None:
    """It was turned on late, or its process was killed before it had sent all."""
    first = RunFolder(tmp_path / "run", Config.make({}))
    for number in (1, 2, 3):
        first.add_round({"round": number, **LINE})
    with RunFolder(tmp_path / "run", Config.make({"wandb": "project"}), after=2) as resumed:
        resumed.add_round({"round": 3, **LINE, **DOMAINS})
    numbers = {"test-accuracy": 0.5, "seconds": 1.0}
    assert fake.rounds == [(1, numbers), (2, numbers), (3, {**numbers, "test-accuracy/svhn": 0.25})]


def test_a_tracker_that_fails_costs_one_warning_and_no_round(
    tmp_path: Path, fake: type[Fake], caplog: pytest.LogCaptureFixture
) -> None:
    fake.broken = True
    folder = RunFolder(tmp_path / "run", Config.make({"wandb": "project"}))
    for number in (1, 2):
        folder.add_round({"round": number, **LINE})
    while not caplog.records:
        time.sleep(0.001)
    fake.broken = False
    folder.add_round({"round": 3, **LINE})
    folder.finish(STATE, {}, {"rounds": 3})
    assert [number for number, _ in fake.rounds] == [1, 2, 3]
    assert fake.ends == [{"rounds": 3}]
    assert len(caplog.records) == 1
    assert "wandb does not take the run's rounds: ConnectionError: no route" in caplog.text


def test_a_tracker_that_cannot_end_its_run_says_so(
    tmp_path: Path, fake: type[Fake], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an earlier failure that has passed."""
    fake.broken = True
    folder = RunFolder(tmp_path / "run", Config.make({"wandb": "project"}))
    folder.add_round({"round": 1, **LINE})
    while not caplog.records:
        time.sleep(0.001)
    fake.broken = False
    monkeypatch.setattr(fake, "close", lambda self, summary: 1 / 0)
    folder.finish(STATE, {}, {"rounds": 1})
    assert [number for number, _ in fake.rounds] == [1]
    assert (
        "wandb has all rounds of the run and did not take its end: ZeroDivisionError" in caplog.records[-1].getMessage()
    )


def test_a_tracker_that_hangs_does_not_stop_the_run(
    tmp_path: Path, fake: type[Fake], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "SECONDS_TO_END", 0.1)
    fake.gate.clear()
    folder = RunFolder(tmp_path / "run", Config.make({"wandb": "project"}))
    for number in (1, 2):
        folder.add_round({"round": number, **LINE})
    folder.finish(STATE, {}, {"rounds": 2})
    assert (folder.path / "summary.json").exists()
    assert "wandb lacks the last 2 of the run's rounds" in caplog.text
    fake.gate.set()


@pytest.mark.parametrize(("key", "value"), [("tensorboard", True), ("wandb", "project"), ("mlflow", "http://host")])
def test_a_missing_package_is_an_error_before_the_run(key: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    absent = TRACKERS[key].module
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == absent else find(name))
    with pytest.raises(
        ConfigError, match=rf"{key}=.* needs the package {absent}.* the checkout: pip install '\.\[{key}\]'"
    ):
        check(Config.make({key: value}))
    check(Config.make({}))


def test_a_relative_folder_of_mlflow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    with pytest.raises(ConfigError, match="mlflow=mlruns: a folder must be an absolute path, such as"):
        check(Config.make({"mlflow": "mlruns"}))


def test_names_of_runs_alone_and_in_a_study(tmp_path: Path) -> None:
    config, out = Config.make({"seed": 3, "series": "ties"}), tmp_path / "digits"
    out.mkdir()
    (out / "study.yaml").touch()
    for name in ("FedBN/own/iid/seed-3", "tune/FedBN/iid/learning-rate=0.1/seed-3"):
        assert (name_of(config, out / name), group_of(config, out / name)) == (name, "digits")
    assert (name_of(config, tmp_path / "one"), group_of(config, tmp_path / "one")) == ("one", "ties")


def test_tensorboard_shows_the_values_of_metrics_jsonl(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = Config.make({"tensorboard": True})
    with RunFolder(tmp_path / "run", config) as first:
        for number in (1, 2, 3):
            first.add_round({"round": number, **LINE, **DOMAINS, "test-accuracy": number / 8})
    with RunFolder(tmp_path / "run", config, after=2) as resumed:
        resumed.add_round({"round": 3, "test-accuracy": 0.75})
    read = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert sorted(read.Tags()["scalars"]) == ["seconds", "test-accuracy", "test-accuracy/svhn"]
    found = [(event.step, event.value) for event in read.Scalars("test-accuracy")]
    assert found == [(1, 0.125), (2, 0.25), (3, 0.75)]
    assert [event.value for event in read.Scalars("test-accuracy/svhn")] == [0.25, 0.25]
    assert not (RunFolder(tmp_path / "other", Config.make({})).path / "tensorboard").exists()


def test_tensorboard_has_each_round_once_after_a_kill(tmp_path: Path) -> None:
    """Rounds that the killed process had on their way are there; those that are repeated are not there twice."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    lines = [{"round": number, **LINE, "test-accuracy": number / 8} for number in range(1, 7)]
    config = Config.make({"tensorboard": True})
    with RunFolder(tmp_path / "run", config.model_copy(update={"tensorboard": False})) as first:
        for line in lines[:4]:
            first.add_round(line)
    killed = TensorBoard(config, tmp_path / "run", 0)
    killed.open()
    for number in (1, 2, 5):  # 3 and 4 were on their way; 5 was lost with the machine, but not here
        killed.add_round(number, {"test-accuracy": 0.0})
    with RunFolder(tmp_path / "run", config, after=4) as resumed:
        for line in lines[4:]:
            resumed.add_round(line)
    events = [e for f in sorted((tmp_path / "run/tensorboard").iterdir()) for e in EventFileLoader(str(f)).Load()]
    found = [(e.step, v.tensor.float_val[0]) for e in events for v in e.summary.value if v.tag == "test-accuracy"]
    assert found == [(n, n / 8) for n in range(1, 7)]


def _interrupted_and_resumed(out: Path, settings: Mapping[str, Any], change: float = 0.0) -> None:
    """Rounds 1 to 3, then a resume after round 2, whose numbers are higher by ``change``."""
    config = Config.make({**SMALL, **settings})
    with RunFolder(out, config) as first:
        for number in (1, 2, 3):
            first.add_round({"round": number, **LINE, "test-accuracy": number / 8})
    time.sleep(1.1)  # Weights & Biases names a session by the second
    with RunFolder(out, config, after=2) as resumed:
        for number in (3, 4):
            resumed.add_round({"round": number, **LINE, "test-accuracy": number / 8 + change})
        resumed.finish(STATE, {}, {"rounds": 4, "sha256": "abc", "final": {"test-accuracy": 0.5}})


@pytest.mark.slow
def test_mlflow_in_a_folder(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    _interrupted_and_resumed(tmp_path / "run", {"mlflow": str(tmp_path / "store")})
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/store/mlflow.db")
    experiment = client.get_experiment_by_name("fedbn-flwr")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["num-server-rounds"] == "4"
    assert found.data.tags["sha256"] == "abc"
    assert found.data.metrics["final/test-accuracy"] == 0.5
    history = client.get_metric_history(found.info.run_id, "test-accuracy")
    assert [(metric.step, metric.value) for metric in history] == [(n, n / 8) for n in (1, 2, 3, 4)]


DRAWN_ANEW = {"masked-sums": True, "num-clients": 3}  # the rounds that a resume repeats have other numbers


@pytest.mark.slow
def test_mlflow_has_the_later_numbers_of_a_round_that_is_drawn_anew(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    _interrupted_and_resumed(tmp_path / "run", {"mlflow": str(tmp_path / "store"), **DRAWN_ANEW}, 0.25)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/store/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("fedbn-flwr").experiment_id])
    history = client.get_metric_history(found.info.run_id, "test-accuracy")
    latest = {metric.step: metric.value for metric in sorted(history, key=lambda metric: metric.timestamp)}
    assert latest == {1: 0.125, 2: 0.25, 3: 0.625, 4: 0.75}


@pytest.mark.slow
def test_weights_and_biases_says_which_rounds_it_has_as_before_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    _interrupted_and_resumed(tmp_path / "run", {"wandb": "team/project", **DRAWN_ANEW}, 0.25)
    assert "wandb has the rounds 3 to 3 as before the resume, and cannot change them" in caplog.text


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions of one run: `wandb sync` puts them together by the id."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    _interrupted_and_resumed(tmp_path / "run", {"wandb": "team/project"})
    sessions = sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    identity = json.loads((tmp_path / "run/wandb/fedbn-run.json").read_text())
    assert [path.stem for path in sessions] == [f"run-{identity['id']}"] * len(sessions)
    assert [step for path in sessions for step in _steps(path)] == [1, 2, 3, 4]


def _steps(path: Path) -> list[int]:
    """Return the steps in a file of Weights & Biases: LevelDB's log format with a head of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, steps, whole = path.read_bytes(), 7, [], b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        whole = (b"" if kind in (1, 2) else whole) + data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            record = Record.FromString(whole)
            if record.WhichOneof("record_type") == "history":
                steps.append(record.history.step.num)
    return steps

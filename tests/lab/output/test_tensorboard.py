"""TensorBoard has each round of a run once.

The pages' ten lines send the rounds to W&B and MLflow.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flwr.app import MetricRecord

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.lab.output.tensorboard_log import TensorBoardLog
from fedbn_flwr.lab.runs.check_start import checked_config

PAGE = Path(__file__).parents[3] / "docs/reference/output-folder.md"
LINE = {
    "phase": "train",
    "test-accuracy": 0.5,
    "participants": [0],
    "kept-previous": True,
    "seconds": 1.0,
}
DOMAINS = {"test-accuracy/svhn": 0.25, "missing": {"client 1": "not connected"}}


def test_tensorboard_shows_the_values_of_metrics_jsonl(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = Config.make({"tensorboard": True})
    with RunFolder(tmp_path / "run", config) as first:
        for number in (1, 2):
            first.add_round(
                {"round": number, **LINE, **DOMAINS, "test-accuracy": number / 8}
            )
    read = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert sorted(read.Tags()["scalars"]) == [
        "seconds",
        "test-accuracy",
        "test-accuracy/svhn",
    ]
    found = [(event.step, event.value) for event in read.Scalars("test-accuracy")]
    assert found == [(1, 0.125), (2, 0.25)]
    assert [event.value for event in read.Scalars("test-accuracy/svhn")] == [0.25, 0.25]
    assert not (
        RunFolder(tmp_path / "other", Config.make({})).path / "tensorboard"
    ).exists()


def test_tensorboard_has_each_round_once_after_a_kill(tmp_path: Path) -> None:
    """Rounds that the killed process was writing are there.

    Repeated rounds occur only once.
    """
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    lines = [
        {"round": number, **LINE, "test-accuracy": number / 8} for number in range(1, 7)
    ]
    with RunFolder(tmp_path / "run", Config.make({})) as first:
        for line in lines[:4]:
            first.add_round(line)
    killed = TensorBoardLog(tmp_path / "run")
    # 3 and 4 were being written; 5 was lost with the machine, but not here
    for number in (1, 2, 5):
        killed.add_round({"round": number, "test-accuracy": 0.0})
    with RunFolder(
        tmp_path / "run", Config.make({"tensorboard": True}), after=4
    ) as resumed:
        for line in lines[4:]:
            resumed.add_round(line)
    events = [
        e
        for f in sorted((tmp_path / "run/tensorboard").iterdir())
        for e in EventFileLoader(str(f)).Load()
    ]
    found = [
        (e.step, v.tensor.float_val[0])
        for e in events
        for v in e.summary.value
        if v.tag == "test-accuracy"
    ]
    assert found == [(n, n / 8) for n in range(1, 7)]


def test_a_missing_package_is_an_error_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: find_spec(name) if name != "tensorboard" else None,
    )
    with pytest.raises(ConfigError, match="needs the package tensorboard"):
        checked_config(Config.make({"num-clients": 2, "tensorboard": True}))


@pytest.mark.parametrize(
    ("package", "function"), [("wandb", "log"), ("mlflow", "log_metrics")]
)
def test_the_lines_of_the_page_bring_each_round_to(
    package: str,
    function: str,
    federate: Any,
    mlp: Any,
    points: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, dict[str, float]]] = []
    stub: Any = ModuleType(package)
    stub.init = stub.start_run = lambda **settings: None
    setattr(stub, function, lambda numbers, step: sent.append((step, numbers)))
    monkeypatch.setitem(sys.modules, package, stub)
    (text,) = re.findall(
        rf"```python.*\n(import {package}\n[^`]*)```", PAGE.read_text()
    )
    assert sum(bool(line) for line in text.splitlines()) <= 10
    names: dict[str, Any] = {}
    exec(text, names)
    result = federate(names["strategy"], mlp, [points(8), points(12, 1)], rounds=2)
    assert {step for step, _ in sent} == {1, 2}
    (loss,) = [
        numbers
        for step, numbers in sent
        if step == 2 and "train_metrics_clientapp/train-loss" in numbers
    ]
    of_run: MetricRecord = result.result.train_metrics_clientapp[2]
    assert loss["train_metrics_clientapp/train-loss"] == of_run["train-loss"]

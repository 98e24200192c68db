"""The ten lines of the page send the rounds to TensorBoard, W&B and MLflow."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flwr.app import MetricRecord

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.output.folder import RunFolder

PAGE = Path(__file__).parents[3] / "docs/reference/output-folder.md"


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


def test_the_lines_of_the_page_bring_each_round_to_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, float, int]] = []

    class Writer(contextlib.nullcontext[None]):
        def __enter__(self) -> Any:
            return self

        def add_scalar(self, *scalar: Any) -> None:
            sent.append(scalar)

    stub: Any = ModuleType("torch.utils.tensorboard")
    stub.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs/read"), Config.make({}))
    for number in (1, 2):
        folder.add_round({"round": number, "phase": "train", "test-loss": number / 8})
    (text,) = re.findall(
        r"```python.*\n(import pandas[^`]*Summary[^`]*)```", PAGE.read_text()
    )
    exec(text, {})
    assert sent == [("test-loss", 0.125, 1), ("test-loss", 0.25, 2)]

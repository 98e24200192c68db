"""Signals (N, C, L) from a function to a module.

They are read, standardised by channel, trained and tested.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.finished_runs.evaluate import evaluate_run
from fedbn_flwr.lab.finished_runs.saved_model import load_model
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.setup import make_model
from tests.support.tables import table

CLASSES, CHANNELS, STEPS = 3, 2, 24


def waves() -> tuple[Any, Any]:
    """Return waves with a frequency for each class and a phase for each example.

    The channels have different units.
    """
    draw, y = np.random.default_rng(0), np.arange(60) % CLASSES
    phase, time = draw.uniform(0, 6, (60, CHANNELS, 1)), np.linspace(0, 6.28, STEPS)
    x = (
        np.sin((y[:, None, None] + 1) * time + phase)
        * 10.0 ** np.arange(CHANNELS)[:, None]
    )
    return x.astype(np.float32), y


class Net(nn.Module):
    """A network that averages over time."""

    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(self.conv(x)).relu().mean(2))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    x, y = waves()
    data = table(monkeypatch, x, y, np.arange(60) // 20)
    sizes = {
        "num-clients": 3,
        "num-server-rounds": 2,
        "local-steps": 2,
        "batch-size": 8,
    }
    return {"dataset": data, "model": f"{__name__}:Net", **sizes}


def test_a_run_on_signals_trains_a_model_of_the_user(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.make({**settings, "strategy": "fixbn", "freeze-at": 1})
    assert data_of(config).shape == (CHANNELS, STEPS)
    run(config, tmp_path / "run", workers=0)
    x, y = waves()
    new = table(monkeypatch, x, y)
    assert evaluate_run(tmp_path / "run", new).rows
    assert load_model(tmp_path / "run")(torch.from_numpy(x[:5])).shape == (5, CLASSES)


def test_models_for_other_inputs_are_refused(settings: Any) -> None:
    for model in ("lenet", "mlp", "resnet20"):
        with pytest.raises(
            ConfigError,
            match=rf"'{model}' does not take examples of shape \(2, 24\).*own model",
        ):
            make_model(Config.make({**settings, "model": model}))


def test_a_function_of_a_user_takes_channels_and_length(
    settings: Any, tmp_path: Path, monkeypatch
) -> None:
    code = """
from torch import nn
def net(num_classes, channels, length):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * length, 4), nn.BatchNorm1d(4), nn.Linear(4, num_classes))
def images(num_classes, channels, size):
    return nn.Identity()
"""
    (tmp_path / "my_signals.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_signals", raising=False)  # gone after the test
    model = make_model(Config.make({**settings, "model": "my_signals:net"}))
    assert model(torch.ones(2, CHANNELS, STEPS)).shape == (2, CLASSES)
    with pytest.raises(
        ConfigError, match=r"'size'\. With these data, .* num_classes, channels, length"
    ):
        make_model(Config.make({**settings, "model": "my_signals:images"}))

"""Signals (N, C, L) from an npz file to ONNX.

They are read, standardised by channel, trained and tested.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.data import own_info
from fedbn_flwr.lab.finished_runs.evaluate import evaluate_run
from fedbn_flwr.lab.finished_runs.saved_model import load_model
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.setup import make_model

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


def saved(path: Path, x: Any, y: Any) -> str:
    np.savez(path, x=x, y=y)
    return f"npz:{path}"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    data = saved(tmp_path / "waves.npz", *waves())
    sizes = {
        "num-clients": 3,
        "num-server-rounds": 2,
        "local-steps": 2,
        "batch-size": 8,
    }
    return {"dataset": data, "model": "signal-cnn", **sizes}


def test_a_run_on_signals_has_a_model_for_them(settings: Any, tmp_path: Path) -> None:
    config = Config.make({**settings, "strategy": "fixbn", "freeze-at": 1})
    assert data_of(config).shape == (CHANNELS, STEPS)
    run(config, tmp_path / "run", workers=0)
    copied = shutil.copy(settings["dataset"].removeprefix("npz:"), tmp_path / "new.npz")
    assert evaluate_run(tmp_path / "run", f"npz:{copied}").rows
    x = torch.from_numpy(waves()[0])
    assert load_model(tmp_path / "run")(x[:5]).shape == (5, CLASSES)


def test_models_for_other_inputs_are_refused(settings: Any) -> None:
    for model in ("lenet", "mlp", "resnet20"):
        with pytest.raises(
            ConfigError,
            match=rf"'{model}' does not take examples of shape \(2, 24\).*signal-cnn",
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


@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (np.zeros((9, 6, 8), np.float64), (6, 8)),
        (np.zeros((9, 6, 6), np.int64), (6, 6)),
        (np.zeros((9, 6, 6), np.uint8), ()),  # grey images
        (np.zeros((9, 1, 6, 6), np.float32), (1, 6, 6)),
    ],
)
def test_arrays_of_numbers_are_signals_and_bytes_are_images(
    x: Any, shape: Any, tmp_path: Path
) -> None:
    config = Config.make(
        {"dataset": saved(tmp_path / "a.npz", x, np.arange(9) % 3), "num-clients": 1}
    )
    assert own_info(data_of(config).own).input_shape == shape

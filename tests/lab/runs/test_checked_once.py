"""A config is checked once, and a process builds a model once.

Both precede the first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typer.testing import CliRunner

from fedbn_flwr import InProcessGrid
from fedbn_flwr.lab import setup
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.config import config as configs
from fedbn_flwr.lab.runs import check_start
from fedbn_flwr.lab.runs import default_app as flower_app
from fedbn_flwr.lab.runs import run as run_module
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.node import RunClients
from fedbn_flwr.training.freezing import stays_in_eval
from tests.support.options import set_options

SMALL = {"num-clients": 3, "num-server-rounds": 2, "local-steps": 2, "batch-size": 8}

Counts = dict[str, int]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Count the checks of keys, the checks of this machine, and model builds."""
    counted: Counts = {}

    def count(module: Any, name: str) -> None:
        real = getattr(module, name)
        counted.setdefault(name, 0)

        def counting(*args: Any, **named: Any) -> Any:
            counted[name] += 1
            return real(*args, **named)

        monkeypatch.setattr(module, name, counting)

    count(configs, "check_data_and_methods")
    count(run_module, "checked_config")
    count(check_start, "checked_config")  # the server app takes it when it runs
    count(setup, "build_model")
    return counted


def test_the_command_checks_and_builds_once(counts: Counts, tmp_path: Path) -> None:
    settings = set_options(SMALL)
    result = CliRunner().invoke(
        app, ["run", *settings, "--workers", "0", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out/summary.json").is_file()
    # The answer at the end reads the config from the folder, which checks it again.
    assert counts == {
        "check_data_and_methods": 2,
        "checked_config": 1,
        "build_model": 1,
    }


@pytest.mark.parametrize(
    "more",
    [
        {"strategy": "centralized"},
        {"strategy": "fixbn", "model": "lenet", "workers": None},
    ],
)
def test_so_does_a_run_from_python(
    counts: Counts, more: dict[str, Any], tmp_path: Path
) -> None:
    workers = more.pop("workers", 0)
    run_module.run(Config.make({**SMALL, **more}), tmp_path / "out", workers=workers)
    assert counts == {
        "check_data_and_methods": 1,
        "checked_config": 1,
        "build_model": 1,
    }


def test_under_flower_the_server_and_the_clients_do_so_each_in_its_process(
    counts: Counts, tmp_path: Path
) -> None:
    settings = {**Config.make({**SMALL, "out": str(tmp_path / "out")}).to_mapping()}
    counts.update(dict.fromkeys(counts, 0))
    context = Context(1, 1, {}, RecordDict(), settings)
    with InProcessGrid(flower_app.client_app, 3, run_config=settings) as grid:
        flower_app.server_app(grid, context)
    assert (tmp_path / "out/summary.json").is_file()
    assert counts == {
        "check_data_and_methods": 2,
        "checked_config": 1,
        "build_model": 2,
    }, "the server's, and one for all three clients"


@pytest.mark.parametrize(
    "settings",
    [
        {"bn-momentum": 0.3},
        {"model": "resnet20", "dataset": "cifar10", "train-only": "layer3,fc"},
    ],
)
def test_clients_get_the_model_as_it_is_built(settings: dict[str, Any]) -> None:
    """They have the modes, momentum and initial values of a model built for them.

    Frozen parts and the memory format are also the same.
    """
    config = Config.make({**SMALL, **settings})
    checked = checked_config(config)
    clients = RunClients.of(checked)
    with torch.no_grad():
        # the server changes its own model
        for entry in checked.model.eval().state_dict().values():
            entry.zero_()
    built, copied = setup.training_model(config), clients._build()
    assert about(copied) == about(built)
    for name, value in built.state_dict().items():
        assert torch.equal(value, copied.state_dict()[name]), name
    assert clients._build() is not copied


def about(model: nn.Module) -> list[Any]:
    modules = [
        (
            path,
            type(module),
            module.training,
            module in stays_in_eval(model),
            getattr(module, "momentum", None),
        )
        for path, module in model.named_modules()
    ]
    parameters = [
        (name, p.requires_grad, p.stride(), p.device)
        for name, p in model.named_parameters()
    ]
    assert any(isinstance(module, _BatchNorm) for module in model.modules())
    return [*modules, *parameters]

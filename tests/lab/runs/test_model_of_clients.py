"""A config is checked once, and a process builds a model once.

Both precede the first step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.lab import setup
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.node import RunClients
from fedbn_flwr.training.freezing import stays_in_eval

SMALL = {"num-clients": 3, "num-server-rounds": 2, "local-steps": 2, "batch-size": 8}


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

"""Optimizers of local training have the bits of torch's optimizers.

The gradient's norm is clipped before their steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.optimizers import make_optimizer, sgd_step


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 5e-4])
def test_steps_have_the_bits_of_torchs_optimizer(momentum: float, decay: float) -> None:
    """The bits also agree in unusual cases.

    Rates change, a parameter gets its first gradient late, another parameter gets none,
    and buffers exist before.
    """
    settings = LocalTraining(
        learning_rate=LearningRate(0.1), sgd_momentum=momentum, weight_decay=decay
    )
    ends: list[list[Any]] = []
    for step in (sgd_step, torch.optim.SGD.step):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()]
        model = nn.Sequential(*layers, nn.Linear(144, 5), nn.Linear(5, 2))
        optimizer = make_optimizer(model, settings)
        if momentum:
            optimizer.state[model[3].weight]["momentum_buffer"] = torch.ones(5, 144)
        for number in range(5):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            model.zero_grad()
            features = model[:4](torch.randn(6, 3, 8, 8))
            (model[4](features) if number > 1 else features).square().mean().backward()
            model[1].bias.grad = None
            step(optimizer)
        ends.append([*model.state_dict().values()])
        for p in model.parameters():
            ends[-1].append(optimizer.state.get(p, {}).get("momentum_buffer"))
    for ours, theirs in zip(*ends, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)

"""Optimizers of local training have the bits of torch's optimizers.

The gradient's norm is clipped before their steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.optimizers import sgd, sgd_step


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
        optimizer = sgd(model, settings)
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


def test_a_step_of_a_large_model_takes_as_many_calls_as_of_a_small_one(
    monkeypatch,
) -> None:
    calls = []
    for name in ("_foreach_add", "_foreach_add_", "_foreach_mul_"):
        real = getattr(torch, name)
        monkeypatch.setattr(
            torch,
            name,
            lambda *args, real=real, **kwargs: calls.append(1) or real(*args, **kwargs),
        )
    settings = LocalTraining(
        learning_rate=LearningRate(0.1), sgd_momentum=0.9, weight_decay=1e-4
    )
    counts = []
    for model in (nn.Linear(2, 2), resnet18(num_classes=2)):
        optimizer = sgd(model, settings)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        calls.clear()
        sgd_step(optimizer)
        counts.append(len(calls))
    assert counts == [4, 4]

"""FedNova's tau is the way of SGD.

``tests/reference`` compares whole runs with the paper's formula.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedbn_flwr.strategies.fednova import TAU, MeasureTau

STEPS = 4


def way_and_tau(rates: list[float], **options: float) -> tuple[float, float]:
    """Return how far SGD moves a weight whose gradients are 1, and the tau."""
    model, hook = nn.Linear(1, 1, bias=False).double(), MeasureTau()
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), rates[0], **options)
    hook.start(model, optimizer)
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        model.weight.grad = torch.ones_like(model.weight)
        hook.step = step
        hook.gradients(model)
        hook.gradients(model)  # a second optimizer after the same backward pass
        optimizer.step()
    return float(start - model.weight.detach()), hook.end(model)[TAU]


SGD = [
    {},
    {"dampening": 0.3},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True},
]


@pytest.mark.parametrize("options", SGD, ids=repr)
@pytest.mark.parametrize("rates", [[0.1] * STEPS, [0.1, 0.3, 0.2, 0.0]], ids=str)
def test_tau_is_the_way_of_gradients_of_1(rates, options) -> None:
    way, tau = way_and_tau(rates, **options)
    assert tau == pytest.approx(way, rel=1e-12)


def test_an_idle_parameter_does_not_change_the_group_of_tau() -> None:
    """Each second step's loss has the first parameter. Groups have other rates."""
    model, hook = nn.Linear(1, 1).double(), MeasureTau()
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]
    hook.start(model, torch.optim.SGD(groups, 0.5))
    for step in range(STEPS):
        model.weight.grad = torch.ones_like(model.weight) if step % 2 else None
        model.bias.grad = torch.ones_like(model.bias)
        hook.step = step
        hook.gradients(model)
    assert hook.end(model)[TAU] == pytest.approx(STEPS * 0.1)

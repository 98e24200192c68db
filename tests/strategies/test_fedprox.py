"""The proximal term of FedProx with complex parameters."""

from __future__ import annotations

import torch
from torch import nn

from fedbn_flwr.strategies.fedprox import ProximalTerm


def test_the_distance_of_complex_parameters_counts_both_parts() -> None:
    model, hook = (
        nn.ParameterList([torch.zeros(2, 3, dtype=torch.cfloat)]),
        ProximalTerm(0.5),
    )
    hook.begin(model)
    with torch.no_grad():
        model[0] += 3 + 4j
    penalty = hook.penalty(model)
    penalty.backward()
    assert penalty.item() == 0.25 * 25 * 6
    assert torch.equal(model[0].grad, 0.5 * model[0].detach())

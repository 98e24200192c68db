"""The proximal term of FedProx, and FedAvg at mu = 0."""

from __future__ import annotations

import functools

import torch
from torch import nn

from fedbn_flwr.strategies import FedAvg, FedProx
from fedbn_flwr.strategies.fedprox import ProximalTerm

SIZES = (6, 13, 9)


def test_fedprox_without_mu_is_fedavg_bit_for_bit(
    federate, datasets, mlp, same_bits
) -> None:
    model = functools.partial(mlp, dropout=0.2)
    runs = [
        federate(s, model, datasets, sgd_momentum=0.9)
        for s in (FedProx(proximal_mu=0.0), FedAvg())
    ]
    same_bits(runs[0].state, runs[1].state)
    other = federate(FedProx(proximal_mu=1e-6), model, datasets, sgd_momentum=0.9)
    assert (other.state["0.weight"] != runs[1].state["0.weight"]).any()


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

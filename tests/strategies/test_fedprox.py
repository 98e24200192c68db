"""FedProx: the proximal term, and FedAvg at mu = 0."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.messages.records import tensors
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


@pytest.mark.parametrize("frozen", [False, True])
def test_fedprox_equals_sgd_by_hand(federate, points, mlp, frozen: bool) -> None:
    """Three full-batch steps a round: grad F + mu (w - w_received), trainable
    parameters only.
    """
    datasets, mu, rate = [points(6, 1), points(8, 2)], 0.7, 0.1

    def model():
        made = mlp()
        made[0].weight.requires_grad_(not frozen)
        return made

    run = federate(
        FedProx(proximal_mu=mu), model, datasets, rounds=1, batch_size=0, local_steps=3
    )
    locals_ = []
    for data in datasets:
        net = model().train()
        received = [p.detach().clone() for p in net.parameters()]
        for _ in range(3):
            loss = F.cross_entropy(net(data.inputs), data.targets)
            parameters = [p for p in net.parameters() if p.requires_grad]
            start = [
                r
                for r, p in zip(received, net.parameters(), strict=True)
                if p.requires_grad
            ]
            for p, g, s in zip(
                parameters, torch.autograd.grad(loss, parameters), start, strict=True
            ):
                p.data -= rate * (g + mu * (p.detach() - s))
        locals_.append(net.state_dict())
    got = tensors(run.state)
    for name in (n for n in got if "num_batches" not in n):
        want = (6 * locals_[0][name] + 8 * locals_[1][name]) / 14
        torch.testing.assert_close(got[name], want, rtol=1e-11, atol=1e-13, msg=name)


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

"""Momentum across rounds: global equals centralized, local survives skipped rounds,
local parts stay local.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import from_record, tensors
from fedbn_flwr.strategies import FedAvg, FedBN, FixBN

SIZES = (6, 13, 9)
ROUNDS, RATE, MOMENTUM = 4, 0.1, 0.9


def centralized(model, datasets, frozen: bool = False, rate: float = RATE):
    net = model().train()
    if frozen:
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.eval()
    optimizer = torch.optim.SGD(
        net.parameters(), rate, momentum=MOMENTUM, weight_decay=0.01
    )
    inputs, targets = (
        torch.cat([getattr(d, key) for d in datasets]) for key in ("inputs", "targets")
    )
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    return net.state_dict()


def run(federate, strategy, model, datasets, **settings):
    options = {
        "batch_size": 0,
        "local_steps": 1,
        "sgd_momentum": MOMENTUM,
        "weight_decay": 0.01,
    }
    return federate(
        strategy,
        model,
        datasets,
        rounds=ROUNDS,
        **{"rate": RATE, **options, **settings},
    )


@pytest.mark.parametrize(
    ("name", "shape", "weight", "rate", "frozen"),
    [
        ("mlp", (5,), "0.weight", RATE, False),
        ("mlp", (5,), "0.weight", RATE, True),
        ("torchvision_net", (3, 20, 20), "fc.weight", 1e-3, True),
    ],
)
def test_global_momentum_equals_centralised_sgd_with_momentum(
    name: str, shape, weight: str, rate: float, frozen: bool, federate, points, request
) -> None:
    """One full-batch step, full participation: a net without batch statistics, and one
    with BN frozen.
    """
    datasets = [points(n, i, shape) for i, n in enumerate((6, 13, 9))]
    model = functools.partial(request.getfixturevalue(name), norm=frozen)
    want = centralized(model, datasets, frozen, rate)
    make = functools.partial(FixBN, freeze_at=0) if frozen else FedAvg
    got = tensors(
        run(federate, make(momentum_scope="global"), model, datasets, rate=rate).state
    )
    for name, value in want.items():
        if value.is_floating_point():
            torch.testing.assert_close(
                got[name], value, rtol=1e-11, atol=1e-13, msg=name
            )
    fresh = tensors(run(federate, make(), model, datasets, rate=rate).state)
    assert (fresh[weight] - want[weight]).abs().max() > 1e-3 * rate


def test_local_momentum_survives_skipped_rounds(federate, datasets, mlp) -> None:
    """A client's buffers in its second round are those its first round ended with,
    however long ago.
    """
    strategy = FedAvg(
        fraction_train=0.34, min_train_nodes=1, momentum_scope="local", seed=1
    )
    done = federate(
        strategy,
        mlp,
        datasets,
        rounds=6,
        sgd_momentum=MOMENTUM,
        batch_size=0,
        local_steps=1,
    )
    chosen = [report.participants[0] for report in strategy.reports]
    again = next(
        i
        for i in range(1, 6)
        if chosen[i] in chosen[: i - 1] and chosen[i - 1] != chosen[i]
    )
    first = chosen.index(chosen[again])
    client = datasets[chosen[again]]

    def gradient(server_round: int) -> torch.Tensor:
        net = mlp().train()
        net.load_state_dict(tensors(done.history[server_round]))
        F.cross_entropy(net(client.inputs), client.targets).backward()
        return net[0].weight.grad

    earlier = [i for i in range(first, again) if chosen[i] == chosen[again]]
    buffer = torch.zeros(4, 5, dtype=torch.float64)
    for server_round in [*earlier, again]:
        buffer = MOMENTUM * buffer + gradient(server_round)
    before = tensors(done.history[again])["0.weight"]
    after = tensors(done.history[again + 1])["0.weight"]
    torch.testing.assert_close(after, before - RATE * buffer, rtol=1e-11, atol=1e-13)


def test_buffers_of_local_parts_stay_local_and_are_counted(
    federate, datasets, mlp
) -> None:
    done = run(federate, FedBN(momentum_scope="global"), mlp, datasets)
    records = [
        from_record(m.content.array_records["momentum"])
        for m in [*done.grid.sent, *done.grid.received]
        if m.has_content() and "momentum" in m.content.array_records
    ]
    assert {name for record in records for name in record} == {
        "0.weight",
        "0.bias",
        "3.weight",
        "3.bias",
    }
    kept = from_record(done.context(0).state.array_records["fedbn-flwr.rules"])
    assert set(kept) == {"MomentumBuffers/1.weight", "MomentumBuffers/1.bias"}
    shared = sum(v.nbytes for n, v in done.state.items() if not n.startswith("1."))
    assert done.strategy.reports[1].train.down == 2 * shared


def test_the_server_averages_buffers_by_size(federate, datasets, mlp) -> None:
    done = run(federate, FedAvg(momentum_scope="global"), mlp, datasets)
    sent = [
        m
        for m in done.grid.received
        if m.has_content() and "momentum" in m.content.array_records
    ][-3:]
    sizes = np.array([len(d) for d in datasets]) / sum(len(d) for d in datasets)
    buffers = [m.content.array_records["momentum"]["0.weight"].numpy() for m in sent]
    want = sum(p * b for p, b in zip(sizes, buffers, strict=True))
    np.testing.assert_allclose(
        done.strategy.run.states["momentum-scope"].momentum["0.weight"],
        want,
        rtol=1e-13,
    )


def test_a_momentum_scope_without_momentum_is_reported(federate, datasets, mlp) -> None:
    with pytest.raises(
        ConfigError, match=r"^momentum-scope=local needs sgd-momentum above 0"
    ):
        run(federate, FedAvg(momentum_scope="local"), mlp, datasets, sgd_momentum=0.0)
    with pytest.raises(ConfigError, match="Did you mean 'global'"):
        FedAvg(momentum_scope="globl")

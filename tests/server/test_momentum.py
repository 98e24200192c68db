"""Momentum across rounds leaves local parts local, and its scope needs momentum.

tests/reference compares its numbers.
"""

from __future__ import annotations

import pytest

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import from_record
from fedbn_flwr.strategies import FedAvg, FedBN

SIZES = (6, 13, 9)

ROUNDS, RATE, MOMENTUM = 4, 0.1, 0.9


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


def test_a_momentum_scope_without_momentum_is_reported(federate, datasets, mlp) -> None:
    with pytest.raises(
        ConfigError, match=r"^momentum-scope=local needs sgd-momentum above 0"
    ):
        run(federate, FedAvg(momentum_scope="local"), mlp, datasets, sgd_momentum=0.0)
    with pytest.raises(ConfigError, match="Did you mean 'global'"):
        FedAvg(momentum_scope="globl")

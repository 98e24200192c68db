"""The exchanges are a step of our own loop; under Flower's own ``start`` they are done where it can be done."""

from __future__ import annotations

import pytest
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.strategies import FedTAN, FedTAN2
from fedbn_flwr.training import LearningRate, LocalTraining


@pytest.mark.parametrize("method", [FedTAN, FedTAN2])
def test_flowers_own_start_gives_the_same_bits(method, points, mlp, same_bits) -> None:
    data = [points(8), points(12, 1)]
    settings = LocalTraining(learning_rate=LearningRate(0.1), local_steps=2, batch_size=4)

    def client_fn(context):
        own = data[int(context.node_config["partition-id"])]
        return TorchClient(mlp(), own, own, settings, context=context)

    own = {"fedtan_rounds": 1} if method is FedTAN2 else {}
    found = []
    for start in (method.start, FlowerFedAvg.start):
        strategy = method(parts=split_state(mlp()), **own)
        with InProcessGrid(client_app(client_fn), 2) as grid:
            result = start(strategy, grid, to_record(mlp().state_dict()), num_rounds=2)
        found.append((from_record(result.arrays), [vars(report) for report in strategy.reports]))
    (ours, our_reports), (theirs, their_reports) = found
    same_bits(ours, theirs)
    assert our_reports == their_reports
    assert [report["train"].exchanges for report in our_reports] == ([4, 4] if method is FedTAN else [4, 1])

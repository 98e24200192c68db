"""Sparse gradients of an embedding train as its dense gradients do."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from fedbn_flwr.strategies import FedAvg, FedProx, Scaffold
from tests.support.fast import thinned
from tests.support.points import Points
from tests.support.user_loops import loop_of_steps

MOMENTUM = {"sgd_momentum": 0.9}
CASES = {
    "decay": (FedAvg(), {**MOMENTUM, "weight_decay": 0.1}),
    "adam": (FedAvg(), {"optimizer": "adam"}),
    "scaffold": (Scaffold(), {}),
    "agc": (FedAvg(agc=0.1), {}),
    "momentum": (FedAvg(momentum_scope="global"), MOMENTUM),
    "a loop": (FedProx(proximal_mu=2.0), {"loop": loop_of_steps}),
}


def words(sparse: bool) -> nn.Module:
    torch.manual_seed(0)
    table = nn.EmbeddingBag(9, 4, sparse=sparse, mode="sum")
    return nn.Sequential(table, nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


@pytest.mark.parametrize("case", thinned(CASES))
def test_every_method_trains_with_sparse_gradients(case: str, federate) -> None:
    strategy, settings = CASES[case]
    texts = torch.arange(60).view(2, 10, 3) ** 2 % 9
    data = [Points(text, text[:, 0] % 3) for text in texts]
    sparse, dense = (
        federate(strategy, functools.partial(words, kind), data, **settings).tensors
        for kind in (True, False)
    )
    torch.testing.assert_close(sparse, dense)

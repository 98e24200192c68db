"""Sparse gradients of an embedding train as its dense gradients do."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.client.hooks import Hooks
from fedbn_flwr.strategies import BNScaffold, FedAvg, Scaffold
from fedbn_flwr.strategies.fedprox import ProximalTerm
from tests.support.points import Points

MOMENTUM = {"sgd_momentum": 0.9}
CASES: dict[str, Any] = {
    "plain": (FedAvg, MOMENTUM),
    "decay": (FedAvg, {**MOMENTUM, "weight_decay": 0.1}),
    "adam": (FedAvg, {"optimizer": "adam"}),
    "scaffold": (Scaffold, {}),
    "bn-scaffold": (BNScaffold, {}),
    "agc": (functools.partial(FedAvg, agc=0.1), {}),
    "momentum": (functools.partial(FedAvg, momentum_scope="global"), MOMENTUM),
}


def words(sparse: bool) -> nn.Module:
    torch.manual_seed(0)
    table = nn.EmbeddingBag(9, 4, sparse=sparse, mode="sum")
    return nn.Sequential(table, nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def texts(seed: int) -> Points:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(9, (10, 4), generator=generator)
    return Points(drawn[:, 1:], drawn[:, 0] % 3)


@pytest.mark.parametrize("case", CASES)
def test_every_method_trains_with_sparse_gradients(case: str, federate) -> None:
    strategy, settings = CASES[case]
    sparse, dense = (
        federate(
            strategy(),
            functools.partial(words, kind),
            [*map(texts, (1, 2))],
            **settings,
        )
        for kind in (True, False)
    )
    torch.testing.assert_close(sparse.tensors, dense.tensors)


def test_a_penalty_in_a_users_loop_trains_with_sparse_gradients() -> None:
    found = []
    for model in map(words, (True, False)):
        rules = Hooks(model, {"hook": ProximalTerm(2.0)})
        with rules.block():
            sgd = rules.wrap(torch.optim.SGD(model.parameters(), 0.1))
            for _ in range(2):
                sgd.zero_grad()
                texts(1).loss(model).backward()
                sgd.step()
        found.append(model.state_dict())
    torch.testing.assert_close(*found)

"""In Flower's own ``start``, FedTAN also exchanges and gives the same bits."""

from __future__ import annotations

import pytest
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr.strategies import FedTAN, FedTAN2

SIZES = (8, 12)


@pytest.mark.parametrize("method", [FedTAN, FedTAN2])
def test_flowers_own_start_gives_the_same_bits(method, federate_mlp, same_bits) -> None:
    class InFlowersLoop(method):
        start = FlowerFedAvg.start

    own = {"fedtan_rounds": 1} if method is FedTAN2 else {}
    options = {"rounds": 2, "local_steps": 2, "grid_options": {"threads": 2}}
    ours, theirs = (
        federate_mlp(kind(**own), barrier=True, **options)
        for kind in (method, InFlowersLoop)
    )
    same_bits(ours.state, theirs.state)
    assert [*map(vars, ours.reports)] == [*map(vars, theirs.reports)]
    second = 4 if method is FedTAN else 1
    assert [report.train.exchanges for report in ours.reports] == [4, second]

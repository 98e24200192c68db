"""In Flower's own ``start``, FedTAN also exchanges and gives the same bits."""

from __future__ import annotations

import pytest
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr.strategies import FedTAN, FedTAN2


@pytest.mark.parametrize("method", [FedTAN, FedTAN2])
def test_flowers_own_start_gives_the_same_bits(
    method, federate, points, mlp, same_bits
) -> None:
    class InFlowersLoop(method):
        start = FlowerFedAvg.start

    own = {"fedtan_rounds": 1} if method is FedTAN2 else {}
    options = {
        "rounds": 2,
        "local_steps": 2,
        "barrier": True,
        "grid_options": {"threads": 2},
    }
    ours = federate(method(**own), mlp, [points(8), points(12, 1)], **options)
    theirs = federate(InFlowersLoop(**own), mlp, [points(8), points(12, 1)], **options)
    our_reports, their_reports = (
        [vars(r) for r in run.reports] for run in (ours, theirs)
    )
    same_bits(ours.state, theirs.state)
    assert our_reports == their_reports
    assert [report["train"].exchanges for report in our_reports] == (
        [4, 4] if method is FedTAN else [4, 1]
    )

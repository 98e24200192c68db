"""A method whose own part is switched off has the bits of the method below it.

These are laws of the methods' docstrings. tests/reference compares the other numbers.
"""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from fedbn_flwr.strategies import (
    Ditto,
    FedAvg,
    FedBN,
    FedProx,
    FedTAN,
    FedTAN2,
    FedWon,
    FixBN,
    combined,
)
from tests.support.fast import thinned

SIZES = (6, 13, 9)
NEVER = partial(FixBN, freeze_at="auto", freeze_window=2, freeze_tau=1e-30)
COLLAPSES = {
    "fedprox": (partial(FedProx, proximal_mu=0.0), FedAvg),
    "fedwon": (partial(FedWon, agc=0), FedAvg),
    "ditto": (Ditto, FedAvg),
    "ditto+fedbn": (combined(FedBN, Ditto), FedBN),
    "fixbn, never frozen": (NEVER, FedAvg),
    "fedtan2, its first phase": (partial(FedTAN2, fedtan_rounds=3), FedTAN),
}


@pytest.mark.parametrize("case", thinned(COLLAPSES))
def test_a_part_that_is_switched_off_changes_no_bit(
    case: str, federate, datasets, mlp, wsconv_net, same_bits
) -> None:
    def trained() -> nn.Module:
        if case == "fedwon":
            return wsconv_net()
        model = mlp(dropout=0.2)
        model[1].running_mean += 0.25
        return model

    options = {"barrier": True, "sgd_momentum": 0.9, "local_steps": 2}
    ours, below = (
        federate(make(), trained, datasets, **options) for make in COLLAPSES[case]
    )
    for mine, wanted in zip(ours.history, below.history, strict=True):
        same_bits(mine, wanted)

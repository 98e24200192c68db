"""``train_only`` keeps the bits of frozen entries under the strategies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.strategies import STRATEGIES
from fedbn_flwr.training.freezing import FrozenBN, train_only
from tests.support.points import Points
from tests.support.synchronised import client_data, trained

TRAINED = ("3", "4", "6")  # These include the second BatchNorm.
SIZES, RATE = (5, 3, 4), 0.1


def net(frozen_bn: FrozenBN | None) -> nn.Module:
    """Return two trained layers with BatchNorm and a head.

    If there is a mode, everything but ``TRAINED`` is frozen.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [
            nn.Linear(5, 4),
            nn.BatchNorm1d(4),
            nn.Tanh(),
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Tanh(),
        ]
        model = trained(nn.Sequential(*parts, nn.Linear(4, 3)))
    if frozen_bn is not None:
        train_only(model, TRAINED, frozen_bn)
    return model


@pytest.fixture
def data() -> list[Points]:
    return client_data((5,), SIZES)


@pytest.mark.parametrize(
    "strategy",
    [
        *(
            "fedprox",
            "scaffold",
            "fedavgm",
            "fedadam",
            "silobn",
            "staticbn",
            "fixbn",
        ),
        *("fedtan2", "fedbs"),
    ],
)
def test_frozen_entries_keep_their_bits(run_step: Any, strategy: str) -> None:
    """The float32 runs use momentum, weight decay, clipping and any server step."""
    model = net("eval").float()
    data = client_data((5,), SIZES, dtype=torch.float32)
    local = {} if strategy.endswith("scaffold") else {"sgd_momentum": 0.9}
    settings: dict[str, Any] = {"agc": 0.1, "fraction_evaluate": 0.0}
    settings |= {} if strategy.endswith("scaffold") else {"momentum_scope": "global"}
    method = STRATEGIES[strategy](**settings)
    run = run_step(
        method, copy.deepcopy(model), data, rounds=3, weight_decay=0.1, **local
    )
    start = model.state_dict()
    for name in run.state:
        same = run.state[name].tobytes() == start[name].numpy().tobytes()
        # Under some strategies, trained BatchNorm stays with the clients.
        if not name.startswith("4."):
            assert same == (not name.startswith(TRAINED)), name

"""A trained entry without dimensions.

NumPy arithmetic makes a scalar of it, and an in-place sum of an array is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.privacy.differential import ClientLevelDP, DPSettings
from fedbn_flwr.strategies import STRATEGIES
from tests.support.fast import thinned
from tests.support.noise import repeat_noise

SIZES = (9, 4, 12)


class Scaled(nn.Sequential):
    """A network whose outputs have a trained scale of the given shape."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__(*net)
        self.scale = nn.Parameter(torch.full(shape, 1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def dp(where: str) -> Callable[[], Any]:
    return lambda: ClientLevelDP(
        DPSettings(dp=where, dp_clipping_norm=0.5, dp_noise_multiplier=0.1),
    )


# Each kind of arithmetic on the entries of a model, at the server or at the clients.
METHODS = ("fedavg", "fedprox", "scaffold", "fedbs", "ditto", "fedavgm", "fedadam")
CASES: dict[str, tuple[Any, Any]] = {
    **{name: (STRATEGIES[name], None) for name in METHODS},
    "dp=server": (STRATEGIES["fedavg"], dp("server")),
    "dp=client": (STRATEGIES["fedavg"], dp("client")),
}


@pytest.mark.parametrize("case", thinned(CASES))
def test_it_has_the_bits_of_an_entry_with_one_value(
    case: str, federate: Any, mlp: Any, datasets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for shape in ((), (1,)):
        make, protection = CASES[case]
        strategy = make()
        if protection:
            repeat_noise(monkeypatch, 3)
            strategy.protect(protection())
        found.append(
            federate(
                strategy,
                lambda shape=shape: Scaled(mlp(), shape),
                datasets,
                rounds=2,
                local_steps=2,
            )
        )
    states = [outcome.state for outcome in found]
    assert states[0]["scale"] != 1.5
    for name in states[0]:
        assert (
            np.reshape(states[0][name], -1).tobytes()
            == np.reshape(states[1][name], -1).tobytes()
        ), name

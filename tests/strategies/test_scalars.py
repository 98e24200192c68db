"""A trained entry without dimensions.

NumPy arithmetic makes a scalar of it, and an in-place sum of an array is lost.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.privacy import DPWrapper
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


# Each kind of arithmetic on the entries of a model, at the server or at the clients.
METHODS = ("fedavg", "fedprox", "scaffold", "fedbs", "ditto", "fedavgm", "fedadam")


@pytest.mark.parametrize(
    ("name", "where"),
    thinned(
        [*((name, "") for name in METHODS), ("fedavg", "server"), ("fedavg", "client")]
    ),
)
def test_it_has_the_bits_of_an_entry_with_one_value(
    name: str, where, federate_mlp, mlp, same_bits, monkeypatch
) -> None:
    states = []
    for shape in ((), (1,)):
        strategy = STRATEGIES[name]()
        if where:
            repeat_noise(monkeypatch, 3)
            DPWrapper(strategy, 0.1, 0.5, where=where)
        run = federate_mlp(
            strategy,
            model=lambda shape=shape: Scaled(mlp(), shape),
            rounds=2,
            local_steps=2,
        )
        states.append(run.state)
    ours, theirs = states
    assert ours["scale"] != 1.5
    same_bits(ours, {**theirs, "scale": theirs["scale"].reshape(())})

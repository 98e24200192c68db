"""Buffers are not part of the steps of FedAvgM, FedAdam, FedYogi and FedAdagrad."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedbn_flwr import strategies
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FedAvg, SiloBN, combined
from fedbn_flwr.strategies.fedopt import FedAdagradMethod, _server_rate

NAMES = ("FedAvgM", "FedAdam", "FedYogi", "FedAdagrad")


class Misnamed(nn.Module):
    """Its names suggest the wrong kind of each entry."""

    def __init__(self) -> None:
        super().__init__()
        self.running_var = nn.Parameter(torch.ones(4, 1))
        self.register_buffer("weight", torch.ones(4, 1))
        self.teacher = nn.Parameter(torch.zeros(4, 1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.lerp_(x.var((0, 2))[:, None], 0.3)
                self.teacher.lerp_(self.running_var, 0.5)
        return x / self.weight.sqrt() + self.running_var


@pytest.mark.parametrize(
    ("rate", "advice"),
    [
        (1.0, "rate=1. In small runs, its default, 0.1, helped"),
        (0.01, "lower server-learning-rate=0.01"),
    ],
)
def test_the_advice_for_a_diverged_run_depends_on_the_rate(
    rate: float, advice: str
) -> None:
    method = FedAdagradMethod(FedAdagradMethod.Params(eta=rate))
    assert advice in _server_rate(method, None)


@pytest.mark.parametrize(
    ("name", "layers"),
    [*((name, layers) for name in NAMES for layers in ("", "1")), ("FedNova", "")],
)
def test_a_server_steps_what_an_optimizer_can_train_and_averages_the_rest(
    name: str, layers: str, federate, points
) -> None:
    """Names do not show which entries are buffers, so the model is asked for.

    The averaged entries include layers that a further method does not treat.
    """

    def model() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        last = nn.utils.parametrizations.weight_norm(nn.Linear(20, 3))
        layers = [norm, nn.BatchNorm1d(2), nn.Conv1d(2, 4, 1), Misnamed(), nn.Flatten()]
        return nn.Sequential(*layers, last).double()

    datasets = [points(size, i, shape=(2, 5)) for i, size in enumerate((4, 9))]
    kind, plain, given = getattr(strategies, name), FedAvg(), {}
    if name == "FedAvgM":
        given = {"server_learning_rate": 0.07}
    if layers:
        kind, plain = combined(SiloBN, kind), SiloBN(layers=layers)
        given |= {"layers": layers}
    for parts in (None, split_state(model().state_dict())):
        asking = kind(**given, parts=parts)
        with pytest.raises(ConfigError, match=r"parts=split_state\(model\)") as error:
            asking.prepare(to_record(model().state_dict()), 1, 1.0)
        assert error.value.problems[0].code == "stepped-buffers"
        assert "3.running_var" in str(error.value)
    stepping = kind(**given, parts=split_state(model()))
    ours, averaged = (
        federate(strategy, model, datasets, rounds=1).state
        for strategy in (stepping, plain)
    )
    for key, value in model().state_dict(keep_vars=True).items():
        equal = ours[key].tobytes() == averaged[key].tobytes()
        assert equal != value.requires_grad, key

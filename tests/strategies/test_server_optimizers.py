"""FedAvgM, FedAdam, FedYogi and FedAdagrad equal Flower's without BatchNorm.

Statistics are not part of their server step.
"""

from __future__ import annotations

import functools
from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch
from torch import nn

from fedbn_flwr import strategies
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.strategies import FedAvg, SiloBN, combined
from tests.support.bad_replies import spoiling
from tests.support.fast import fast

SIZES = (6, 14, 10, 8)
ROUNDS, ETA, MOMENTUM = 5, 0.07, 0.8
BETA_1, BETA_2, TAU = 0.85, 0.95, 2e-3
ARGUMENTS: dict[str, dict[str, float]] = {
    "FedProx": {},
    "FedAvgM": {"server_learning_rate": ETA, "server_momentum": MOMENTUM},
    "FedAdam": {"eta": ETA, "beta_1": BETA_1, "beta_2": BETA_2, "tau": TAU},
    "FedYogi": {"eta": ETA, "beta_1": BETA_1, "beta_2": BETA_2, "tau": TAU},
    "FedAdagrad": {"eta": ETA, "tau": TAU},
}
NAMES = [name for name in ARGUMENTS if name != "FedProx"]  # methods with a server step


@pytest.mark.parametrize(("lost", "arguments"), [((), False), ((1, 3), True)])
@pytest.mark.parametrize("name", fast(ARGUMENTS, "FedAdam", "FedYogi"))
def test_without_batchnorm_they_equal_flowers(
    name: str, lost: tuple[int, ...], arguments: bool, federate, datasets, mlp
) -> None:
    """Both run with the same arguments or with their defaults.

    A round without replies counts, because FedAdam corrects its step by the round
    number.
    """

    def fail(content: Any) -> None:
        raise RuntimeError("no reply")

    app = functools.partial(spoiling, fail, rounds=lost, who=range(len(SIZES)))
    given = {"fraction_evaluate": 0.0, **(ARGUMENTS[name] if arguments else {})}
    start, rounds = functools.partial(mlp, norm=False), {"rounds": ROUNDS}
    ours = federate(
        getattr(strategies, name)(**given), start, datasets, wrap=app, **rounds
    )
    kept = [r.server_round for r in ours.strategy.reports if r.kept_previous]
    assert kept == [*lost]
    theirs = getattr(flower, name)(**given).start(
        grid=ours.grid.inner,
        initial_arrays=to_record(start().state_dict()),
        num_rounds=ROUNDS,
    )
    for key, want in from_record(theirs.arrays).items():
        np.testing.assert_allclose(
            ours.state[key], want, rtol=1e-9, atol=1e-12, err_msg=key
        )


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
    kind, given, plain = getattr(strategies, name), ARGUMENTS.get(name, {}), FedAvg()
    if layers:
        kind, plain = combined(SiloBN, kind), SiloBN(layers=layers)
        given = {**given, "layers": layers}
    for parts in (None, split_state(model().state_dict())):
        asking = kind(**given, parts=parts)
        with pytest.raises(ConfigError, match=r"parts=split_state\(model\)") as error:
            asking.prepare(to_record(model().state_dict()), 1, 1.0)
        assert error.value.problems[0].code == "stepped-buffers"
        assert "3.running_var" in str(error.value)
    stepping = kind(**given, parts=split_state(model()))
    runs = [federate(s, model, datasets, rounds=1) for s in (stepping, plain)]
    for key, value in model().state_dict(keep_vars=True).items():
        equal = runs[0].state[key].tobytes() == runs[1].state[key].tobytes()
        assert equal != value.requires_grad, key

"""Models that a method cannot use are refused before the first message.

The refusal gives advice that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import FrozenBatchNorm2d

from fedbn_flwr.batchnorm.parts import name_once, split_state
from fedbn_flwr.client import TorchClient
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.mods import bn_rules
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.server.methods.phases import model_needs
from fedbn_flwr.strategies import (
    MTFL,
    STRATEGIES,
    FedAvg,
    FedBN,
    FedTAN,
    FedTAN2,
    FedWon,
    FixBN,
    SiloBN,
    Standalone,
    StaticBN,
)
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.run_memory import memory_of_run


def net(convolution: bool = False, **options: bool) -> nn.Module:
    """Return a network with BatchNorm at 1 and 3, made with ``options``."""
    if convolution:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        )
    return nn.Sequential(
        *(
            layer
            for _ in range(2)
            for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4, **options))
        )
    )


def bare() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2))


def refused(strategy: FedAvg, model: nn.Module) -> str:
    """Return the error of ``start`` without a grid, so that no message is sent."""
    with pytest.raises(NormLayerError) as error:
        strategy.start(
            grid=None, initial_arrays=to_record(model.state_dict()), num_rounds=200
        )
    return str(error.value)


class Own(nn.Module):
    """A BatchNorm that is not a torch BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(4)),
            nn.Parameter(torch.zeros(4)),
        )
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
        )


def beside(other: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), other, nn.Linear(4, 3)
    ).double()


def accepted(strategy: FedAvg, model: nn.Module) -> None:
    strategy.prepare(to_record(model.state_dict()), 200, 1)


@pytest.mark.parametrize(
    "method",
    [m for m in STRATEGIES.values() if model_needs(m().methods.whole)],
    ids=lambda m: m.name,
)
def test_methods_about_batchnorm_refuse_a_model_without(method: type[FedAvg]) -> None:
    needs = f"strategy '{method.name}' needs BatchNorm"
    assert needs in refused(method(parts=split_state(bare())), bare())
    strategy = method()
    by_names = refused(strategy, bare())
    assert needs in by_names
    assert "parts=split_state(model)" in by_names, (
        "names do not show layers without statistics"
    )
    accepted(strategy, net())  # the split by names is made again for another model


UNTRACKED, PLAIN = {"track_running_stats": False}, {"affine": False}
NO_STATISTICS, NO_AFFINE = "running statistics", "gamma and beta"
LACKING = {
    "fixbn": (FixBN(), UNTRACKED, NO_STATISTICS),
    "fixbn, affine too": (FixBN(freeze_affine=True), PLAIN, NO_AFFINE),
    "fedtan2": (FedTAN2(), UNTRACKED, NO_STATISTICS),
    "silobn": (SiloBN(), UNTRACKED, NO_STATISTICS),
    "staticbn": (StaticBN(), UNTRACKED, NO_STATISTICS),
    "mtfl": (MTFL(), PLAIN, NO_AFFINE),
    "fedbn": (FedBN(), UNTRACKED | PLAIN, f"{NO_AFFINE} or {NO_STATISTICS}"),
    "recalibrate": (FedAvg(recalibrate=True), UNTRACKED, "recalibrate=true"),
    "its test": (
        FedAvg(eval_on="global, recalibrated"),
        UNTRACKED,
        "eval-on=recalibrated",
    ),
}


@pytest.mark.parametrize("case", LACKING)
def test_methods_refuse_layers_without_the_parts_that_they_are_about(case: str) -> None:
    strategy, options, needed = LACKING[case]
    strategy.parts = split_state(net(**options))
    said = refused(strategy, net(**options))
    assert needed in said
    assert "2 BatchNorm layers (1, 3)" in said
    strategy.parts = split_state(net())
    accepted(strategy, net())


def test_a_method_that_still_has_something_to_do_is_not_refused() -> None:
    cases: list[tuple[type[FedAvg], dict[str, Any]]] = [
        (FedBN, UNTRACKED),
        (FedBN, PLAIN),
        (MTFL, UNTRACKED),
    ]
    for method, options in [*cases, (SiloBN, PLAIN), (FedTAN, UNTRACKED | PLAIN)]:
        accepted(method(parts=split_state(net(**options))), net(**options))
    for method in (FedAvg, Standalone):
        accepted(method(parts=split_state(bare())), bare())


def test_fedwon_refuses_batchnorm_and_a_model_without_convolutions() -> None:
    assert "2 BatchNorm layers (1, 3)" in refused(FedWon(), net(convolution=True))
    pointwise = nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)
    )
    for model in (bare(), pointwise):  # a filter of one weight cannot be standardised
        assert "convolutions, but the model has none" in refused(FedWon(), model)
    model, _ = replace_norm(net(convolution=True), "wsconv")
    accepted(FedWon(), model)


class Ported(nn.Module):
    """Statistics with TensorFlow's names, or only a variance."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        for name in names:
            self.register_buffer(name, torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        *_, variance = self.buffers()
        if self.training:
            variance.lerp_(x.detach().square().mean(0), 0.1)
        return self.weight * x / variance.sqrt()


OTHERS = {
    "own": Own,
    "ported": lambda: Ported("moving_mean", "moving_variance"),
    "no mean": lambda: Ported("running_var"),
    "instance": lambda: Instance(4, track_running_stats=True),
    "own with a counter": lambda: Counted(),
}


COMPLEX = ("running_mean", "running_covar", "num_batches_tracked")


class Instance(nn.InstanceNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.stack([x, 2 * x], 2)).mean(2)


class Counted(Own):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))


@pytest.fixture
def named(caplog) -> Iterator[Callable[[], int]]:
    """Return a function that counts the warnings of a new run about layer 3."""
    with memory_of_run():
        yield lambda: sum("'3'" in text for text in caplog.messages)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_clients_name_such_a_layer_once_in_a_run(make, named, points) -> None:
    """This includes clients whose server runs elsewhere and has only names."""
    model, data = beside(make()), points(9)
    settings = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
    for server_round in (1, 2):
        one = TorchClient(model, data, data, settings, partition_id=0)
        one.fit(one.get_parameters({}), {"server-round": server_round})
        with bn_rules(model, {"server-round": server_round}):
            pass
    assert named() == 1


def test_bn_rules_name_it_too(named) -> None:
    for server_round in (1, 2):
        with bn_rules(beside(Own()), {"server-round": server_round}):
            pass
    assert named() == 1


@pytest.mark.parametrize(
    "other",
    [nn.BatchNorm1d(4), nn.InstanceNorm1d(4), FrozenBatchNorm2d(4), nn.Identity()],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_of_torch_and_frozen_ones_are_not_named(other, named) -> None:
    model = beside(other)
    accepted(FedBN(parts=split_state(model)), model)
    name_once(model)
    assert named() == 0

"""Models that a method cannot use are refused before the first message.

The refusal gives advice that helps.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.messages.records import to_record
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

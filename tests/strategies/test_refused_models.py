"""Models that a method cannot use are refused from Python before the first message, with advice that helps."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.server.travels import model_needs
from fedbn_flwr.strategies import MTFL, STRATEGIES, FedAvg, FedBN, FedTAN, FedTAN2, FedWon, FixBN, SiloBN, StaticBN


def net(convolution: bool = False, **options: bool) -> nn.Module:
    """A network with BatchNorm at 1 and 3; ``options`` are those of the layers."""
    if convolution:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    return nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4, **options))))


def bare() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2))


def refused(strategy: FedAvg, model: nn.Module) -> str:
    """The error of ``start``; there is no grid, so no message can be sent."""
    with pytest.raises(NormLayerError) as error:
        strategy.start(grid=None, initial_arrays=to_record(model.state_dict()), num_rounds=200)
    return str(error.value)


def accepted(strategy: FedAvg, model: nn.Module) -> None:
    strategy.prepare(to_record(model.state_dict()), 200, 1)


@pytest.mark.parametrize(
    "method", [m for m in STRATEGIES.values() if model_needs(m().methods.whole)], ids=lambda m: m.name
)
def test_methods_about_batchnorm_refuse_a_model_without(method: type[FedAvg]) -> None:
    said = "strategy '{}' needs BatchNorm; the model has {}. Use FedAvg, or a model with BatchNorm."
    assert refused(method(parts=split_state(bare())), bare()) == said.format(method.name, "none")
    strategy = method()
    by_names = (
        "none that the names of its arrays show (BatchNorm without running statistics is found only with "
        "parts=split_state(model))"
    )
    assert refused(strategy, bare()) == said.format(method.name, by_names)
    accepted(strategy, net())  # another model: the split by names is made anew


UNTRACKED, PLAIN = {"track_running_stats": False}, {"affine": False}
LAYERS = "; the model has 2 BatchNorm layers (1, 3) without "
NO_STATISTICS = f"BatchNorm with running statistics{LAYERS}(track_running_stats=False). Use FedAvg, or a model"
NO_AFFINE = f"BatchNorm with gamma and beta{LAYERS}(affine=False). Use FedAvg, or a model with BatchNorm with gamma"
NOTHING = f"with gamma and beta or running statistics{LAYERS}(affine=False, track_running_stats=False). Use FedAvg, or"
LACKING = {
    "fixbn": (FixBN(), UNTRACKED, NO_STATISTICS),
    "fixbn, affine too": (FixBN(freeze_affine=True), PLAIN, NO_AFFINE),
    "fedtan2": (FedTAN2(), UNTRACKED, NO_STATISTICS),
    "silobn": (SiloBN(), UNTRACKED, NO_STATISTICS),
    "staticbn": (StaticBN(), UNTRACKED, NO_STATISTICS),
    "mtfl": (MTFL(), PLAIN, NO_AFFINE),
    "fedbn": (FedBN(), UNTRACKED | PLAIN, NOTHING),
    "recalibrate": (FedAvg(recalibrate=True), UNTRACKED, "recalibrate=true needs BatchNorm with running statistics; "),
    "its test": (FedAvg(eval_on="global, recalibrated"), UNTRACKED, "eval-on=recalibrated needs BatchNorm with runn"),
}


@pytest.mark.parametrize("case", LACKING)
def test_methods_refuse_layers_without_the_parts_that_they_are_about(case: str) -> None:
    strategy, options, said = LACKING[case]
    strategy.parts = split_state(net(**options))
    assert said in refused(strategy, net(**options))
    strategy.parts = split_state(net())
    accepted(strategy, net())


def test_a_method_that_still_has_something_to_do_is_not_refused() -> None:
    cases: list[tuple[type[FedAvg], dict[str, Any]]] = [(FedBN, UNTRACKED), (FedBN, PLAIN), (MTFL, UNTRACKED)]
    for method, options in [*cases, (SiloBN, PLAIN), (FedTAN, UNTRACKED | PLAIN)]:
        accepted(method(parts=split_state(net(**options))), net(**options))


def test_fedwon_refuses_batchnorm_and_a_model_without_convolutions() -> None:
    assert refused(FedWon(), net(convolution=True)) == (
        "strategy 'fedwon' trains without normalisation; the model has 2 BatchNorm layers (1, 3). Use a model without "
        "them: model, report = replace_norm(model, 'wsconv')."
    )
    assert refused(FedWon(), bare()) == (
        "strategy 'fedwon' standardises the weights of convolutions; the model has none. Use FedAvg, or a model with "
        "convolutions."
    )
    pointwise = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    assert "the model has none" in refused(FedWon(), pointwise), "a filter of one weight cannot be standardised"
    model, _ = replace_norm(net(convolution=True), "wsconv")
    accepted(FedWon(), model)

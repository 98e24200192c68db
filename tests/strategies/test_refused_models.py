"""Models, layers and entries that a method cannot use are refused before a message.

The refusal gives advice that helps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from fedbn_flwr.batchnorm.layers import batchnorm_layers
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import ConfigError, FedBNError, NormLayerError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.strategies import (
    HBN,
    MTFL,
    FedAvg,
    FedBN,
    FedDNA,
    FedRep,
    FedTAN,
    FedTAN2,
    FedWon,
    FixBN,
    Scaffold,
    SiloBN,
    Standalone,
    StaticBN,
    combined,
)
from tests.support.written_out import below, network

Build = Callable[[], nn.Module]


def net(**options: bool) -> nn.Module:
    """Return a network with BatchNorm at 1 and 3, made with ``options``."""
    first, second = (nn.BatchNorm1d(4, **options) for _ in range(2))
    return nn.Sequential(nn.Linear(4, 4), first, nn.Linear(4, 4), second)


def untracked() -> nn.Module:
    return net(track_running_stats=False)


def plain() -> nn.Module:
    return net(affine=False)


def neither() -> nn.Module:
    return net(track_running_stats=False, affine=False)


def bare() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2))


def images(kernel: int = 3, norm: bool = True) -> nn.Module:
    layers = [nn.BatchNorm2d(4)] * norm
    return nn.Sequential(nn.Conv2d(1, 4, kernel), *layers, nn.Flatten())


def pointwise() -> nn.Module:
    return images(1, norm=False)


def only_parameters():
    """Return the arrays of ``parameters()`` without the buffers."""
    return to_record(dict(net().named_parameters()))


def begin(strategy: FedAvg[Any], model: nn.Module, split: bool = True) -> None:
    """Start without a grid, so that no message can be sent."""
    if split and strategy.parts is None:
        strategy.parts = split_state(model)
    start = model if isinstance(model, dict) else to_record(model.state_dict())
    strategy.start(grid=None, initial_arrays=start, num_rounds=200)


STATISTICS, AFFINE = "running statistics", "gamma and beta"
BOTH = "2 BatchNorm layers (1, 3)"
ABOUT_BN = (FedBN, SiloBN, MTFL, StaticBN, FixBN, FedTAN, FedTAN2, FedDNA)
TOGETHER = (FedTAN, FedTAN2, FedDNA)
# The strategy, the model that it refuses, the class of the error, and its words.
REFUSED = [
    *(
        (kind, untracked, NormLayerError, STATISTICS, BOTH)
        for kind in (FixBN, FedTAN2, HBN, SiloBN, StaticBN)
    ),
    (lambda: FixBN(freeze_affine=True), plain, NormLayerError, AFFINE, BOTH),
    *(
        (
            partial(FixBN, freeze_affine=True, train_only="1", **more),
            net,
            NormLayerError,
            "freezes all",
        )
        for more in ({}, {"personal": "1.weight"}, {"layers": "1"})
    ),
    (MTFL, plain, NormLayerError, AFFINE, BOTH),
    (FedBN, neither, NormLayerError, f"{AFFINE} or {STATISTICS}", BOTH),
    (
        lambda: FedAvg(recalibrate=True),
        untracked,
        NormLayerError,
        "recalibrate=true",
        BOTH,
    ),
    (
        lambda: FedAvg(eval_on="global, recalibrated"),
        untracked,
        NormLayerError,
        "eval-on=recalibrated",
        BOTH,
    ),
    (FedWon, net, NormLayerError, BOTH),
    (FedWon, network, NormLayerError, "denselayer1.norm1, ...)"),
    (FedWon, bare, NormLayerError, "convolutions, but the model has none"),
    # A filter of one weight cannot be standardised.
    (FedWon, pointwise, NormLayerError, "convolutions, but the model has none"),
    (
        lambda: FedAvg(parts=split_state(bare())),
        net,
        ConfigError,
        "parts= lacks",
        "1.running_mean",
    ),
    # Entries that a user names.
    (
        lambda: FedAvg(personal="classifier,clasifier.*"),
        network,
        ConfigError,
        "clasifier.*",
        "'classifier'",
    ),
    (lambda: FedAvg(personal="type:LayerNorm"), network, ConfigError, "LayerNorm"),
    (
        lambda: FedBN(personal="type:Conv2d,type:Linear"),
        network,
        ConfigError,
        "personal",
    ),
    (lambda: FedTAN(personal="features.norm0"), network, ConfigError, "personal"),
    (lambda: FedRep(personal="head"), network, ConfigError, "head"),
    # Layers that a user names.
    (
        lambda: FedBN(layers="features.norm0,features.nrm5"),
        network,
        ConfigError,
        "features.nrm5",
    ),
    (
        lambda: FedBN(
            parts=split_state(network(), "features.norm5"), layers="features.norm0"
        ),
        network,
        ConfigError,
        "layers",
    ),
    (
        lambda: FedAvg(parts=split_state(network(), "classifier")),
        network,
        ConfigError,
        "classifier",
    ),
    *(
        (partial(kind, **given), network, ConfigError, "layers")
        for given in (
            {"layers": "features.norm0"},
            {"parts": split_state(network(), "features.norm0")},
        )
        for kind in TOGETHER
    ),
    (
        lambda: batchnorm_layers(
            nn.ModuleList([network(), network()]), ["features.norm0"]
        ),
        network,
        FedBNError,
        "features.norm0",
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[3])
def test_what_a_method_cannot_use_is_refused_by_name(case: tuple[Any, ...]) -> None:
    make, model, kind, *words = case
    with pytest.raises(kind) as caught:
        begin(make(), model())
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("method", ABOUT_BN, ids=lambda m: m.name)
def test_methods_about_batchnorm_refuse_a_model_without(method: type[FedAvg]) -> None:
    """Names do not show layers without statistics."""
    strategy = method()
    for given in (method(parts=split_state(bare())), strategy):
        with pytest.raises(NormLayerError) as caught:
            begin(given, bare(), split=False)
        assert f"strategy '{method.name}' needs BatchNorm" in str(caught.value)
    assert "parts=split_state(model)" in str(caught.value)
    # The split by names is made again for another model.
    strategy.prepare(to_record(net().state_dict()), 200, 1)


def test_arrays_of_parameters_and_names_without_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^the arrays lack 6 of the entries"):
        FedAvg(parts=split_state(net())).prepare(only_parameters(), 1, 1)
    with pytest.raises(ConfigError, match="type:Linear"):
        begin(FedAvg(personal="type:Linear"), net(), split=False)


HEAD = "classifier.*"
ACCEPTED = [
    (FedBN(), untracked),
    (FedBN(), plain),
    (MTFL(), untracked),
    (SiloBN(), plain),
    (FedTAN(), neither),
    (FedAvg(), bare),
    (Standalone(), bare),
    (FixBN(freeze_affine=True, train_only="1,3", layers="1"), net),
    (FedWon(), lambda: replace_norm(images(), "wsconv")[0]),
    (FedTAN(personal=HEAD), network),
    (FixBN(personal=f"{HEAD},features.norm0.weight"), network),
    (combined(FedBN, Scaffold)(personal=HEAD), network),
    # A layer that the method leaves to FedAvg may stay as a whole.
    (FixBN(layers="*.denseblock1", personal="features.norm0"), network),
]


@pytest.mark.parametrize(("strategy", "model"), ACCEPTED)
def test_a_method_that_has_something_to_do_is_accepted(strategy, model: Build) -> None:
    built = model()
    strategy.parts = split_state(built)
    strategy.prepare(to_record(built.state_dict()), 200, 1)
    if strategy.params.personal == HEAD:
        assert below(built, "classifier.") <= set(strategy.run.local_entries)

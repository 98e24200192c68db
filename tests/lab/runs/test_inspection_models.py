"""``inspect`` of every strategy on every listed model equals a slow count that only knows layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.models import MODELS
from fedbn_flwr.lab.runs.inspection import inspect_model
from fedbn_flwr.lab.setup import make_model
from fedbn_flwr.server.report import Traffic
from fedbn_flwr.strategies import STRATEGIES

CLIENTS = 3
EXAMPLES = {
    "torchvision:<name>": ["resnet18", "mobilenet_v2", "densenet121", "alexnet"],
    "torchvision-seg:<name>": ["lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"],
    "timm:<name>": ["test_resnet"],
    "smp:<architecture>/<encoder>": ["DeepLabV3Plus/mobilenet_v2"],
    "signal-cnn": [],  # its data are a file
    "<module>:<function>": [],
}
LISTED = [name.partition("<")[0] + example for name in MODELS for example in EXAMPLES.get(name, [""])]
PARTS = ("affine", "statistics", "counters", "rest")
# What the papers say of each method; those not named here share everything and send nothing else.
LOCAL = {"fedbn": PARTS[:3], "silobn": PARTS[1:3], "mtfl": PARTS[:1], "standalone": PARTS}
VARIATES = {"scaffold", "bn-scaffold"}
MOMENTS = {"fbn", "hbn", "bn-scaffold"}
COMMON = {"bn-scaffold"}  # statistics of all clients go down
SYNCHRONISED = {"fedtan": (3, 4), "fedtan2": (3, 4), "feddna": (2, 2)}  # exchanges a layer, numbers a channel
FROZEN = {"fixbn", "fedtan2"}
ROUNDS, LAST = 10, 4


def settings(model: str, **more: Any) -> Config:
    seg = model.startswith(("torchvision-seg:", "smp:"))
    data = "cityscapes" if seg else "mnist" if model in ("mlp", "fedbs-mnist") else "cifar10"
    chosen = {"model": model, "dataset": data, "image-size": 64 if seg else 0, "num-server-rounds": ROUNDS}
    return Config.make_of_shared({"freeze-at": LAST, "fedtan-rounds": LAST}, {**chosen, **more})[0]


def slow_parts(model: nn.Module) -> dict[str, list[tuple[str, int, int]]]:
    """(entry, elements, bytes of one) of each part, layer by layer."""
    fates = {"weight": "affine", "bias": "affine", "num_batches_tracked": "counters"}
    found: dict[str, list[tuple[str, int, int]]] = {part: [] for part in PARTS}
    for path, layer in model.named_modules():
        own = dict(layer.named_parameters(recurse=False)) | dict(layer.named_buffers(recurse=False))
        for name, value in own.items():
            part = fates.get(name, "statistics") if isinstance(layer, _BatchNorm) else "rest"
            found[part].append((f"{path}.{name}".lstrip("."), value.numel(), value.element_size()))
    return found


def slow_rounds(model: nn.Module, strategy: str) -> list[Traffic]:
    """The traffic of each round, entry by entry and client by client."""
    entries = slow_parts(model)
    trainable = sum(p.numel() * p.element_size() for p in model.parameters())
    channels = [layer.num_features for layer in model.modules() if isinstance(layer, _BatchNorm)]
    per_layer, rows = SYNCHRONISED.get(strategy, (0, 0))
    rounds = []
    for server_round in range(1, ROUNDS + 1):
        cost = Traffic(exchanges=1)
        for part in PARTS:
            size = sum(count * width for _, count, width in entries[part])
            stays = part in LOCAL.get(strategy, ())
            down, up = 0 if stays and server_round > 1 else size, 0 if stays else CLIENTS * size
            if part == "counters":
                cost.counters_down, cost.counters_up = cost.counters_down + down, cost.counters_up + up
            else:
                cost.down, cost.up = cost.down + down, cost.up + up
        if strategy in VARIATES:
            cost.up += CLIENTS * trainable
            cost.down += trainable if server_round > 1 else 0
        if strategy in MOMENTS:
            cost.up += CLIENTS * 4 * 2 * sum(channels)
            cost.counters_up += CLIENTS * 8 * len(channels)
            cost.down += 4 * 2 * sum(channels) if strategy in COMMON and server_round > 1 else 0
        if strategy not in FROZEN or server_round <= LAST:
            cost.exchanges += per_layer * len(channels)
            cost.down += 4 * rows * sum(channels)
            cost.up += 4 * rows * sum(channels) * CLIENTS
            if rows:  # beside each variance: the examples per element
                cost.counters_down += 4 * len(channels)
                cost.counters_up += 4 * len(channels) * CLIENTS
        rounds.append(cost)
    return rounds


def check(model: nn.Module, strategy: str, config: Config) -> None:
    found, entries = inspect_model(model, strategy, CLIENTS, config), slow_parts(model)
    named = {part: {name for name, _, _ in entries[part]} for part in PARTS}
    assert {part: set(found.parts.select(frozenset({Part(part)}))) for part in PARTS} == named
    counts = {part: sum(count for _, count, _ in entries[part]) for part in PARTS}
    assert {part.value: found.floats[part] + found.counters[part] for part in Part} == counts
    assert {part.value for part in found.local} == set(LOCAL.get(strategy, ()))
    rounds = [phase.traffic for phase in found.phases for _ in range(phase.rounds or 0)]
    assert rounds == slow_rounds(model, strategy)
    channels = [layer.num_features for layer in model.modules() if isinstance(layer, _BatchNorm)]
    assert Counter(found.synchronised) == Counter(channels if strategy in SYNCHRONISED else [])
    frozen = [{part.value for part in phase.frozen} for phase in found.phases for _ in range(phase.rounds or 0)]
    assert frozen == [set(PARTS[1:3]) if strategy in FROZEN and i >= LAST else set() for i in range(ROUNDS)]


LARGE = ("alexnet-bn", "torchvision:alexnet")  # 60 million parameters


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in LISTED])
def test_inspect_lists_the_entries_that_every_strategy_sends(name: str, needs) -> None:
    plain = make_model(settings(name))
    for strategy in STRATEGIES:
        norm = needs(strategy).get("norm", "batch")
        config = settings(name, strategy=strategy, norm=norm)
        check(plain if norm == "batch" else make_model(config), strategy, config)


def test_gamma_and_beta_freeze_if_configured() -> None:
    config = settings("mlp", strategy="fixbn", **{"freeze-affine": True})
    first, last = inspect_model(make_model(config), "fixbn", CLIENTS, config).phases
    assert (first.name, first.rounds, first.frozen) == ("before T*", LAST, frozenset())
    assert (last.name, last.rounds, last.frozen) == ("frozen", ROUNDS - LAST, set(Part) - {Part.REST})


@pytest.mark.parametrize(
    ("at", "phases"), [(0, [("frozen", 10)]), (10, [("before T*", 10)]), (99, [("before T*", 10)])]
)
def test_phases_without_rounds_are_not_shown(at: int, phases: list[tuple[str, int]]) -> None:
    config = settings("mlp", strategy="fixbn", **{"freeze-at": at})
    found = inspect_model(make_model(config), "fixbn", CLIENTS, config)
    assert [(phase.name, phase.rounds) for phase in found.phases] == phases


def test_global_momentum_travels_from_the_second_round() -> None:
    """In a synchronised round too."""
    config = settings("mlp", strategy="fedtan2", **{"sgd-momentum": 0.9, "momentum-scope": "global"})
    model = make_model(config)
    found = inspect_model(model, "fedtan2", CLIENTS, config)
    trainable = 4 * sum(p.numel() for p in model.parameters())
    assert [(phase.name, phase.rounds) for phase in found.phases] == [
        ("synchronised", 1),
        ("synchronised", 3),
        ("frozen", 6),
    ]
    first, second, _ = (phase.traffic for phase in found.phases)
    assert second.down - first.down == trainable
    assert first.up == second.up


def test_an_automatic_round_is_not_predicted() -> None:
    config = settings("mlp", strategy="fedtan2", **{"fedtan-rounds": "auto", "freeze-window": 2})
    found = inspect_model(make_model(config), "fedtan2", CLIENTS, config)
    assert [(phase.name, phase.rounds) for phase in found.phases] == [("synchronised", None), ("frozen", None)]

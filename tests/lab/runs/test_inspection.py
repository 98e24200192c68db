"""The traffic that ``inspect`` predicts is the traffic of a run, for every strategy and
model; the papers' sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.client import client_app
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.lab.config import Config, method_of
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.lab.runs.inspection import Inspection, inspect_model
from fedbn_flwr.lab.setup import local_training, make_model, make_strategy
from fedbn_flwr.messages.records import Traffic
from fedbn_flwr.server.methods.travels import model_needs
from fedbn_flwr.strategies import STRATEGIES
from tests.support.federation import torch_clients

GLOBAL_MOMENTUM = {"sgd-momentum": 0.9, "momentum-scope": "global"}
CLIENTS = 5  # of the papers' figures; where every strategy is tried, two do


class Noise:
    """A few random images in place of a data set."""

    def __init__(self, channels: int, size: int) -> None:
        self.images = torch.randn(
            4, channels, size, size, generator=torch.Generator().manual_seed(0)
        )

    def __len__(self) -> int:
        return len(self.images)

    def batch(
        self, positions: torch.Tensor, generator: torch.Generator | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[positions], positions % 10


def settings(strategy: str, model: str, norm: str, rounds: int) -> Config:
    """Both phases of a method that has two, for ResNet-20 on three channels or a
    smaller model on one.
    """
    size = {
        "dataset": "cifar10" if model == "resnet20" else "mnist",
        "model": model,
        "norm": norm,
    }
    quick = {
        "batch-size": 2,
        "local-steps": 2,
        "learning-rate": 0.001,
        "num-server-rounds": rounds,
    }
    return Config.make_of_shared(
        {**quick, "fedtan-rounds": 1}, {"strategy": strategy, **size}
    )[0]


def predicted(found: Inspection) -> list[Traffic]:
    """The traffic of each round; every round is tested."""
    reestimation = found.reestimation.traffic if found.reestimation else Traffic()
    rounds: list[Traffic] = []
    for phase in found.phases:
        rounds += [phase.traffic.plus(reestimation)] * (phase.rounds or 0)
    return rounds


def measured(run_strategy, config: Config, clients: int) -> list[Traffic]:
    """The training traffic of the rounds of a real federation."""
    data = Noise(*((3, 32) if config.model == "resnet20" else (1, 28)))
    method = make_strategy(config, make_model(config), clients)
    method.fraction_evaluate = 0.0
    app = client_app(
        torch_clients(
            lambda: make_model(config), [data] * clients, local_training(config)
        )
    )
    start, rounds = make_model(config).state_dict(), config.num_server_rounds
    together = {"barrier": True, "grid_options": {"threads": clients}}
    run_strategy(method, app, start, clients, rounds=rounds, **together)
    assert all(report.participants == list(range(clients)) for report in method.reports)
    return [report.train for report in method.reports]


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_predicted_traffic_equals_measured_traffic(
    run_strategy, strategy: str, norm: str
) -> None:
    """Of LeNet, with two norm layers; test_run.py has the MLP."""
    config = settings(
        strategy, "lenet", "wsconv" if strategy == "fedwon" else norm, rounds=2
    )
    found = inspect_model(make_model(config), strategy, 2, config)
    if any("a run is refused" in warning for warning in found.warnings):
        assert norm == "group"
        assert model_needs(method_of(config).methods.whole)
        with pytest.raises(NormLayerError):
            measured(run_strategy, config, 2)
        return
    assert measured(run_strategy, config, 2) == predicted(found)
    assert found.total().exchanges == sum(
        traffic.exchanges for traffic in predicted(found)
    )


# the first two refuse it, the last has no MLP
WITHOUT_MOMENTUM = ("scaffold", "bn-scaffold", "fedwon")
FURTHER = [
    *(
        {"strategy": name, **GLOBAL_MOMENTUM}
        for name in STRATEGIES
        if name not in WITHOUT_MOMENTUM
    ),
    {"strategy": "fbn", "fbn-measure": "pass"},
    {"strategy": "fbn", "statistics-aggregation": "trimmed-mean:0.2"},
    {"strategy": "hbn", "share-alpha": True},
    {"strategy": "fedavg", "feature-norm": "sqrt-d"},
    {"strategy": "fixbn", "client-hooks": "scaffold"},
    {"strategy": "fedbn", "client-hooks": "scaffold"},
    {"strategy": "mtfl", "server-step": "fedadam", **GLOBAL_MOMENTUM},
    {"strategy": "fedavgm", "client-hooks": "fedtan"},
]


@pytest.mark.parametrize(
    "own", FURTHER, ids=lambda own: "+".join(map(str, own.values()))
)
def test_predicted_traffic_equals_measured_traffic_with_further_settings(
    run_strategy, own: Mapping[str, Any]
) -> None:
    values = settings("fedavg", "mlp", "batch", rounds=3).to_mapping()
    shared = {"freeze-at": 2, "fedtan-rounds": 1}
    config, _ = Config.make_of_shared(shared, {**values, "local-epochs": 0, **own})
    found = inspect_model(make_model(config), config.strategy, 2, config)
    assert measured(run_strategy, config, 2) == predicted(found)
    assert found.local == method_of(config).methods.local


def test_statistics_that_a_test_alone_uses_cost_what_recalibrate_costs() -> None:
    found = []
    size = {"dataset": "mnist", "model": "mlp", "num-server-rounds": 2}
    for tests in ({"recalibrate": True}, {"eval-on": "recalibrated,global"}, {}):
        config = Config.make({**size, **tests})
        inspection = inspect_model(make_model(config), "fedavg", 2, config)
        found.append(inspection.reestimation)
    assert found[0] is not None
    assert found[0] == found[1]
    assert found[2] is None


@pytest.mark.parametrize(
    ("norm", "floats", "statistics", "megabytes"),
    [("batch", 271_098, 1_376, 6.2049), ("group", 269_722, 0, 6.1734)],
)
def test_resnet20_has_the_papers_sizes(
    run_strategy, norm: str, floats: int, statistics: int, megabytes: float
) -> None:
    """arXiv:2301.02982, Tables 3 and 4: floats of ResNet-20 and MB of a FedAvg round
    with 5 clients.
    """
    model = build_model("resnet20", num_classes=10, channels=3, size=32, norm=norm)
    found = inspect_model(model, "fedavg", CLIENTS)
    assert sum(found.floats.values()) == floats
    assert found.floats[Part.STATISTICS] == statistics
    assert found.counters == {
        part: 19 if part is Part.COUNTERS and norm == "batch" else 0 for part in Part
    }
    assert math.isclose(found.later.megabytes, megabytes, abs_tol=5e-5)
    (traffic,) = measured(
        run_strategy, settings("fedavg", "resnet20", norm, rounds=1), CLIENTS
    )
    assert (traffic.down, traffic.up) == (4 * floats, 4 * floats * CLIENTS)
    assert math.isclose(traffic.megabytes, megabytes, abs_tol=5e-5)


def test_warnings_name_what_is_not_counted() -> None:
    config = Config.make(
        {"dataset": "digits", "model": "mlp", "num-clients": 10, "masked-sums": True}
    )
    (warning,) = inspect_model(make_model(config), "fedavg", 10, config).warnings
    assert warning.startswith("masked-sums: its further exchanges")
    config = Config.make(
        {"dataset": "digits", "model": "mlp", "num-clients": 10, "fraction-train": 0.2}
    )
    assert inspect_model(make_model(config), "fedavg", 2, config).warnings == ()
    (warning,) = inspect_model(make_model(config), "fedbn", 2, config).warnings
    assert warning.startswith(
        "fraction-train: a client first asked after round 1 gets the whole model"
    )


def test_warnings_name_what_a_method_would_not_do() -> None:
    plain = torch.nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    assert inspect_model(plain, "fedbn", 2).warnings == (
        (
            "strategy 'fedbn' needs BatchNorm with gamma and beta or running"
            " statistics; the model has 1 BatchNorm layer ((the model itself)) without"
            " (affine=False, track_running_stats=False): a run is refused"
        ),
        "1 BN layer(s) have no gamma and beta to keep: ",
        (
            "1 BN layer(s) track no running statistics and use the batch's own in"
            " testing: "
        ),
    )
    model = build_model("mlp", num_classes=10, channels=1, size=28)
    assert all(
        inspect_model(model, strategy, 2).warnings == ()
        for strategy in STRATEGIES
        if strategy != "fedwon"
    )


@pytest.mark.parametrize("frozen_bn", ["eval", "train"])
@pytest.mark.parametrize(
    "strategy",
    ["fedtan", "feddna", "scaffold", "bn-scaffold", "staticbn", "hbn", "fedavg"],
)
def test_predicted_traffic_with_frozen_layers(
    run_strategy, strategy: str, frozen_bn: str
) -> None:
    """Layers after a frozen network have no exchange of gradients; variates are of
    trained parameters only.
    """
    asked = {
        "model": "lenet",
        "dataset": "mnist",
        "train-only": "fc3,norm2,conv2",
        "frozen-bn": frozen_bn,
    }
    quick = {
        "batch-size": 2,
        "local-steps": 1,
        "num-server-rounds": 2,
        "learning-rate": 0.001,
    }
    momentum = GLOBAL_MOMENTUM if strategy == "fedavg" else {}
    config = Config.make({"strategy": strategy, **asked, **quick, **momentum})
    found = inspect_model(make_model(config), strategy, 2, config)
    assert measured(run_strategy, config, 2) == predicted(found)
    assert len(found.frozen) == 8
    assert found.fixed == (("norm1",) if frozen_bn == "eval" else ())


def test_a_layer_that_is_called_by_keyword_is_an_exchange() -> None:
    class ByKeyword(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = torch.nn.BatchNorm2d(1), torch.nn.Linear(28 * 28, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(input=x).flatten(1))

    config = Config.make({"dataset": "digits", "model": "mlp", "strategy": "fedtan"})
    assert inspect_model(ByKeyword(), "fedtan", 2, config).synchronised == (1,)


@pytest.mark.parametrize(
    ("own", "phases"),
    [
        (
            {"strategy": "fixbn", "freeze-at": 0},
            [("frozen", 10, {"statistics", "counters"})],
        ),
        ({"strategy": "fixbn", "freeze-at": 10}, [("before T*", 10, set())]),
        ({"strategy": "fixbn", "freeze-at": 99}, [("before T*", 10, set())]),
        (
            {"strategy": "fixbn", "freeze-at": 4, "freeze-affine": True},
            [
                ("before T*", 4, set()),
                ("frozen", 6, {"affine", "statistics", "counters"}),
            ],
        ),
        (
            {"strategy": "fedtan2", "fedtan-rounds": "auto", "freeze-window": 2},
            [
                ("synchronised", None, set()),
                ("frozen", None, {"statistics", "counters"}),
            ],
        ),
    ],
)
def test_phases_are_those_of_the_settings(
    own: Mapping[str, Any], phases: list[tuple[str, int | None, set[str]]]
) -> None:
    config = Config.make(
        {"dataset": "mnist", "model": "mlp", "num-server-rounds": 10, **own}
    )
    found = inspect_model(make_model(config), config.strategy, 2, config).phases
    assert [
        (phase.name, phase.rounds, {part.value for part in phase.frozen})
        for phase in found
    ] == phases


@pytest.mark.parametrize(
    "model", ["resnet20", "torchvision:mobilenet_v2", "timm:test_resnet"]
)
def test_the_parts_of_a_model_are_those_of_its_layers(model: str) -> None:
    """Counted layer by layer, by the names of BatchNorm's entries."""
    config = Config.make({"dataset": "cifar10", "model": model})
    network = make_model(config)
    counts = dict.fromkeys(Part, 0)
    fates = {
        "weight": Part.AFFINE,
        "bias": Part.AFFINE,
        "num_batches_tracked": Part.COUNTERS,
    }
    for layer in network.modules():
        entries = [
            *layer.named_parameters(recurse=False),
            *layer.named_buffers(recurse=False),
        ]
        for name, value in entries:
            normal = isinstance(layer, _BatchNorm)
            part = fates.get(name, Part.STATISTICS) if normal else Part.REST
            counts[part] += value.numel()
    found = inspect_model(network, "fedavg", 2, config)
    assert {part: found.floats[part] + found.counters[part] for part in Part} == counts

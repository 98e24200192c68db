"""``inspect`` predicts the traffic of a run for every strategy and model.

It also gives the papers' sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedbn_flwr.client import client_app
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.lab.config import Config, method_of
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.lab.runs.inspection import Inspection, inspect_model
from fedbn_flwr.lab.setup import local_training, make_model, make_strategy
from fedbn_flwr.messages.records import Traffic, num_bytes
from fedbn_flwr.strategies import STRATEGIES
from tests.support.fast import fast
from tests.support.federation import (
    Outcome,
    RecordingGrid,
    run_strategy,
    torch_clients,
)
from tests.support.synchronised import TRANSPORTS

# The other optimizers of the server and FedProx send what FedAvg sends.
SAME = ("fedyogi", "fedadagrad", "fedavgm", "fedprox")
# The plain average, entries that stay, further entries, phases, an exchange in each
# step and queries.
KINDS = ("fedtan",)
SCHEMES = fast([name for name in STRATEGIES if name not in SAME], *KINDS)
SIZES = {
    "batch-size": 2,
    "local-steps": 2,
    "local-epochs": 0,
    "learning-rate": 0.001,
    "sgd-momentum": 0.9,
}


class Noise:
    """A few random images instead of a data set."""

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


# A draw may change these settings; the first value is the default.
AXES: Mapping[str, tuple[Any, ...]] = {
    "model": ("lenet", "mlp"),
    "norm": ("batch", "group"),
    "local-part": ("", "fedbn", "silobn", "mtfl"),
    "client-hooks": (
        "",
        *("ditto", "scaffold", "staticbn", "fixbn", "fedtan", "fedrep"),
    ),
    "server-step": ("", "fedadam", "fedavgm"),
    "momentum-scope": ("none", "local", "global"),
    "fedtan-exchanges": ("3L+1", "2L+1"),
    "eval-on": (
        "",
        *("averaged-bn", "recalibrated", "global,recalibrated", "personal-own"),
    ),
    "recalibrate": (False, True),
    "eval-every": (1, 2),
    "personal": ("", "last-layer", "norm1", "norm2.weight", "conv2"),
    "layers": ("", "norm1"),
    "train-only": ("", "fc3,norm2,conv2"),
    "frozen-bn": ("eval", "train"),
    "feature-norm": ("", "sqrt-d"),
}


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """Return a transport, and up to four settings that are not the default."""
    keys = draw(st.lists(st.sampled_from(list(AXES)), max_size=4, unique=True))
    own = {key: draw(st.sampled_from(AXES[key][1:])) for key in keys}
    return {"transport": draw(st.sampled_from(TRANSPORTS)), **own}


def config_of(strategy: str, own: Mapping[str, Any]) -> Config:
    """Return the config of a short run, in both phases of a method that has two.

    Settings without an effect are left out.
    """
    drawn = {**own}
    transport = drawn.pop("transport", TRANSPORTS[0])
    if strategy == "fedwon":
        drawn["norm"] = "wsconv"
    if "momentum-scope" not in drawn:
        drawn["sgd-momentum"] = 0.0
    # Clients of one process with a barrier need no transport.
    drawn["fedtan-transport"] = transport.replace("barrier", "messages")
    phases = {"num-server-rounds": 3, "freeze-at": 2, "fedtan-rounds": 1}
    chosen = {"strategy": strategy, "dataset": "mnist", "model": "lenet"}
    chosen["model"] = drawn.pop("model", "lenet")
    return Config.make_of_shared({**SIZES, **phases, **drawn}, chosen)[0]


def predicted(found: Inspection, eval_every: int) -> list[Traffic]:
    """Return the traffic of each round."""
    rounds: list[Traffic] = []
    for phase in found.phases:
        rounds += [phase.traffic] * (phase.rounds or 0)
    if found.reestimation:
        for place in range(len(rounds)):
            if (place + 1) % eval_every == 0 or place + 1 == len(rounds):
                rounds[place] = rounds[place].plus(found.reestimation.traffic)
    return rounds


def run_of(config: Config, transport: str = "barrier") -> Outcome:
    """Return a run of the config on random images."""
    shape = (3, 32) if config.dataset == "cifar10" else (1, 28)
    datasets = [Noise(*shape)] * 2
    strategy = make_strategy(config, make_model(config), 2)
    training = local_training(config)
    app = client_app(torch_clients(lambda: make_model(config), datasets, training))
    with ExitStack() as grids:
        outcome = run_strategy(
            grids,
            strategy,
            app,
            make_model(config).state_dict(),
            2,
            rounds=config.num_server_rounds,
            barrier=transport == "barrier",
            grid_options={"threads": 2},
        )
    for report in strategy.reports:
        assert report.participants == [0, 1]
    return outcome


def broadcasts(grid: RecordingGrid, message_type: str) -> dict[int, list[ArrayRecord]]:
    """Return the records in the messages of a type by round, without duplicates."""
    found: dict[int, dict[Any, ArrayRecord]] = {}
    for message in grid.sent:
        if message.metadata.message_type.startswith(message_type):
            config: dict[str, Any] = dict(*message.content.config_records.values())
            of_round = found.setdefault(int(config.get("server-round", 0)), {})
            for name, record in message.content.array_records.items():
                content = [(key, array.data) for key, array in record.items()]
                of_round[(message.metadata.message_type, name, *content)] = record
    return {number: list(records.values()) for number, records in found.items()}


@pytest.mark.parametrize("strategy", SCHEMES)
@settings(max_examples=2, deadline=None, derandomize=True, database=None)
@example(own={"transport": "barrier"})
@example(own={"momentum-scope": "global", "transport": "messages"})
@example(own={"recalibrate": True, "layers": "norm1", "eval-every": 2})
@example(own={"eval-on": "global,averaged-bn"})
@example(own={"train-only": "fc3,norm2,conv2", "frozen-bn": "train"})
@given(own=changes())
def test_predicted_bytes_equal_counted_bytes_equal_those_of_the_messages(
    strategy: str, own: dict[str, Any]
) -> None:
    """A draw that the package refuses proves nothing."""
    try:
        config = config_of(strategy, own)
        found = inspect_model(make_model(config), strategy, 2, config)
    except ConfigError:
        return
    transport = own.get("transport", TRANSPORTS[0])
    if any("A run is refused" in warning for warning in found.warnings):
        with pytest.raises(NormLayerError):
            run_of(config, transport)
        return
    outcome = run_of(config, transport)
    reports, grid = outcome.strategy.reports, outcome.grid

    tests = [Traffic() for _ in reports]
    for number, records in broadcasts(grid, "evaluate").items():
        tests[number - 1].exchanges += 1
        for record in records:
            tests[number - 1].count_down(num_bytes(record))
    counted = [report.train.plus(report.evaluate) for report in reports]
    without = [
        all_of.plus(test, -1) for all_of, test in zip(counted, tests, strict=True)
    ]
    assert without == predicted(found, config.eval_every)
    assert found.local == method_of(config).methods.local

    # Only messages count, and a barrier or channel exchanges without messages.
    if found.synchronised and transport != "messages":
        return
    total = functools.reduce(Traffic.plus, counted)
    down = [one for records in broadcasts(grid, "").values() for one in records]
    up = [
        record
        for reply in grid.received
        if reply.has_content()
        for record in reply.content.array_records.values()
    ]
    assert total.down + total.counters_down == sum(sum(num_bytes(one)) for one in down)
    assert total.up + total.counters_up == sum(sum(num_bytes(one)) for one in up)


def test_warnings_name_what_is_not_counted() -> None:
    config = Config.make(
        {"dataset": "digits", "model": "mlp", "num-clients": 10, "fraction-train": 0.2}
    )
    assert inspect_model(make_model(config), "fedavg", 2, config).warnings == ()
    (warning,) = inspect_model(make_model(config), "fedbn", 2, config).warnings
    assert warning.startswith(
        "fraction-train: a client gets the whole model if it is first asked"
    )


def test_warnings_name_what_a_method_would_not_do() -> None:
    plain = torch.nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    assert inspect_model(plain, "fedbn", 2).warnings == (
        (
            "strategy 'fedbn' needs BatchNorm with gamma and beta or running"
            " statistics, but model 'mlp' has 1 BatchNorm layer ((the model itself))"
            " without (affine=False, track_running_stats=False). Use FedAvg, or a model"
            " with BatchNorm with gamma and beta or running statistics. A run is"
            " refused."
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

"""The client in two kinds of ClientApp.

The kinds are Flower's legacy app under Flower's FedAvg, and our app on the Message API.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    ConfigRecord,
    Context,
    Message,
    MessageType,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import Server, ServerConfig, SimpleClientManager
from flwr.server.compat import start_grid
from flwr.server.strategy import FedAvg as LegacyFedAvg

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages.records import from_record, to_record, to_state
from fedbn_flwr.training import LearningRate, LocalTraining

SETTINGS = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
SIZES = (8, 12, 20)
MakeClient = Callable[[Context], TorchClient]


@pytest.fixture
def client_fn(points, mlp) -> MakeClient:
    def make(context: Context) -> TorchClient:
        data = points(
            SIZES[int(context.node_config["partition-id"])],
            int(context.node_config["partition-id"]),
        )
        return TorchClient(mlp(dropout=0.3), data, data, SETTINGS, context=context)

    return make


def state_of(model) -> dict[str, Array]:
    return {name: array.copy() for name, array in to_state(model.state_dict()).items()}


@pytest.mark.parametrize("inplace", [True, False])
def test_flowers_legacy_fedavg_runs_through_flowers_own_client_app(
    client_fn, mlp, open_grid, inplace: bool
) -> None:
    """Flower averages counters as floats, or in place as zeros.

    Both must load in the next round as rounded numbers.
    """
    counters: list[float] = []

    class Watched(LegacyFedAvg):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            assert not failures
            parameters, metrics = super().aggregate_fit(server_round, results, failures)
            counters.append(float(parameters_to_ndarrays(parameters)[6]))
            return parameters, metrics

    strategy = Watched(
        initial_parameters=ndarrays_to_parameters(
            list(state_of(mlp(dropout=0.3)).values())
        ),
        min_fit_clients=3,
        min_evaluate_clients=3,
        min_available_clients=3,
        inplace=inplace,
        on_fit_config_fn=lambda server_round: {"server-round": server_round},
    )
    server = Server(client_manager=SimpleClientManager(), strategy=strategy)
    grid = open_grid(
        ClientApp(client_fn=lambda context: client_fn(context).to_client())
    )
    history = start_grid(grid=grid, server=server, config=ServerConfig(num_rounds=2))
    assert len(history.losses_distributed) == 2
    first = np.average([2, 3, 5], weights=SIZES)
    second = np.average([4 + 2, 4 + 3, 4 + 5], weights=SIZES)
    assert counters == (
        pytest.approx([0, 0]) if inplace else pytest.approx([first, second])
    ), "3.8 loads as 4"


def ask(
    grid: InProcessGrid, content: RecordDict, kind: str, partition: int = 0
) -> Message:
    (reply,) = grid.send_and_receive(
        [Message(content, grid.get_node_ids()[partition], kind)]
    )
    return reply


class Plain(NumPyClient):
    """Somebody's own client."""

    def __init__(
        self, answer: Callable[[list[Array], dict], tuple] | None = None
    ) -> None:
        self.answer = answer

    def fit(self, parameters, config):
        if self.answer:
            return self.answer(parameters, config)
        for array in parameters:
            array += 1
        return parameters, 4, {"loss": 0.5, "note": "fine", "blob": b"x"}

    def evaluate(self, parameters, config):
        return 0.25, 5, {"accuracy": 0.75}


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: c.to_client()])
def test_any_numpy_client_works(open_grid, wrap) -> None:
    grid = open_grid(client_app(lambda _: wrap(Plain())))
    content = RecordDict(
        {"arrays": to_record({"x": np.zeros(2)}), "config": ConfigRecord()}
    )
    reply = ask(grid, content, MessageType.TRAIN)
    assert from_record(reply.content["arrays"])["x"].tolist() == [1, 1]
    assert dict(reply.content["metrics"]) == {"num-examples": 4, "loss": 0.5}
    assert dict(reply.content["properties"]) == {"note": "fine", "blob": b"x"}
    assert dict(ask(grid, content, MessageType.EVALUATE).content["metrics"]) == {
        "num-examples": 5,
        "loss": 0.25,
        "accuracy": 0.75,
    }
    about = dict(ask(grid, RecordDict(), MessageType.QUERY, 2).content["metrics"])
    assert about == {"partition-id": 2, "num-partitions": 3}


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (None, "TypeError"),
        (([], 4), "ValueError"),
        (([], "4", {}), "returned num_examples='4', which is not a number"),
        (([], 4, None), "TypeError"),
    ],
)
def test_what_a_client_must_return_is_named(returned: Any, why: str, open_grid) -> None:
    content = RecordDict(
        {"arrays": to_record({"x": np.zeros(2)}), "config": ConfigRecord()}
    )
    client = Plain(lambda p, _: returned)
    client.evaluate = lambda p, _: returned  # type: ignore[method-assign]
    grid = open_grid(client_app(lambda _: client))
    reason = ask(grid, content, MessageType.TRAIN).error.reason
    assert why in reason
    reason = ask(grid, content, MessageType.EVALUATE).error.reason
    assert why in reason


def test_a_client_fn_that_returns_no_client_is_refused(open_grid) -> None:
    reply = ask(
        open_grid(client_app(lambda _: "client")), RecordDict(), MessageType.QUERY
    )
    assert (
        "client_fn returned str, but client_app needs a flwr.client.NumPyClient"
        in reply.error.reason
    )

"""The client in two kinds of ClientApp.

The kinds are Flower's legacy app under Flower's FedAvg, and our app on the Message API.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    ConfigRecord,
    Message,
    MessageType,
    RecordDict,
)
from flwr.client import NumPyClient

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages.protocol import NodeProperties
from fedbn_flwr.messages.records import from_record, to_record


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


def test_an_app_describes_its_nodes_without_a_client_as_their_answers_do(
    open_grid,
) -> None:
    """Without ``num_examples``, only the number of examples is missing."""
    nodes = [{"site-name": "Köln/Süd, 1"}, {"data-path": "own"}, {"num-partitions": 9}]
    app = client_app(lambda _: Plain(), num_examples=lambda _: 4)
    grid = open_grid(app, node_configs=nodes)
    found = grid.node_properties({}, grid.get_node_ids())
    replies = [ask(grid, RecordDict(), MessageType.QUERY, at) for at in range(3)]
    answers = map(NodeProperties.read, replies)
    assert [*found.values()] == [replace(one, num_examples=4) for one in answers]


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

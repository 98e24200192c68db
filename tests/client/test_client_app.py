"""The client in two kinds of ClientApp.

The kinds are Flower's legacy app under Flower's FedAvg, and our app on the Message API.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.client import NumPyClient

from fedbn_flwr.client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages.protocol import NodeProperties
from fedbn_flwr.messages.records import from_record, to_record
from tests.support.in_process import to


def ask(grid: InProcessGrid, kind: str, partition: int = 0) -> Message:
    """Return the reply to a message with an array."""
    arrays = to_record({"x": np.zeros(2)})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord()})
    (reply,) = grid.send_and_receive(to(grid, partition, kind=kind, content=content))
    return reply


class Plain(NumPyClient):
    """Somebody's own client."""

    def fit(self, parameters, config):
        for array in parameters:
            array += 1
        return parameters, 4, {"loss": 0.5, "note": "fine", "blob": b"x"}

    def evaluate(self, parameters, config):
        return 0.25, 5, {"accuracy": 0.75}


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: c.to_client()])
def test_any_numpy_client_works(open_grid, wrap) -> None:
    grid = open_grid(client_app(lambda _: wrap(Plain())))
    reply = ask(grid, "train")
    assert from_record(reply.content["arrays"])["x"].tolist() == [1, 1]
    assert dict(reply.content["metrics"]) == {"num-examples": 4, "loss": 0.5}
    assert dict(reply.content["properties"]) == {"note": "fine", "blob": b"x"}
    tested = {"num-examples": 5, "loss": 0.25, "accuracy": 0.75}
    assert dict(ask(grid, "evaluate").content["metrics"]) == tested
    about = dict(ask(grid, "query", 2).content["metrics"])
    assert about == {"partition-id": 2, "num-partitions": 3}


def test_an_app_describes_its_nodes_without_a_client_as_their_answers_do(
    open_grid,
) -> None:
    """Without ``num_examples``, only the number of examples is missing."""
    nodes = [{"site-name": "Köln/Süd, 1"}, {"data-path": "own"}, {"num-partitions": 9}]
    app = client_app(lambda _: Plain(), num_examples=lambda _: 4)
    grid = open_grid(app, node_configs=nodes)
    found = grid.node_properties({}, grid.get_node_ids())
    for partition, properties in enumerate(found.values()):
        answer = NodeProperties.read(ask(grid, "query", partition))
        assert properties == replace(answer, num_examples=4)
    assert partition == 2


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (None, "TypeError"),
        (([], 4), "ValueError"),
        (([], "4", {}), "returned num_examples='4', which is not a number"),
        (([], 4, None), "TypeError"),
    ],
)
def test_what_a_client_must_return_is_named(returned, why: str, open_grid) -> None:
    client = Plain()
    client.fit = client.evaluate = lambda *_: returned  # type: ignore[method-assign]
    grid = open_grid(client_app(lambda _: client))
    for kind in ("train", "evaluate"):
        assert why in ask(grid, kind).error.reason, kind


def test_a_client_fn_that_returns_no_client_is_refused(open_grid) -> None:
    said = "client_fn returned str, but client_app needs a flwr.client.NumPyClient"
    grid = open_grid(client_app(lambda _: "client"))
    assert said in ask(grid, "query").error.reason

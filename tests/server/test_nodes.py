"""Who takes part: two nodes with one partition, and nodes without usable data."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.nodes import NodeRegistry


class Answers:
    """A grid whose nodes answer the query with what they are given, a number as an error; ``asked`` tells whom."""

    def __init__(self, nodes: Mapping[int, dict[str, Any] | int]) -> None:
        self.nodes = dict(nodes)
        self.asked: list[list[int]] = []

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        batch = list(messages)
        self.asked.append([message.metadata.dst_node_id for message in batch])
        return [self._reply(message) for message in batch]

    def _reply(self, message: Message) -> Message:
        said = self.nodes[message.metadata.dst_node_id]
        message.metadata.__dict__.update(_message_id="1", _run_id=1)
        if isinstance(said, int):
            return Message(Error(said, "lost"), reply_to=message)
        content = RecordDict({"metrics": MetricRecord({k: v for k, v in said.items() if not isinstance(v, str)})})
        if texts := {key: value for key, value in said.items() if isinstance(value, str)}:
            content["properties"] = ConfigRecord(texts)
        return Message(content, reply_to=message)


def node(partition: int, examples: int = 5, **more: Any) -> dict[str, Any]:
    return {"partition-id": partition, "num-examples": examples, "batch-size": 1, **more}


@pytest.fixture
def nodes() -> NodeRegistry:
    InProcessGrid(ClientApp(), 1).close()  # Flower makes messages only in a process that has an identity
    return NodeRegistry(seed=0, timeout=1)


def test_two_nodes_with_one_partition_are_refused_at_the_start(nodes: NodeRegistry) -> None:
    with pytest.raises(ConfigError) as caught:
        nodes.present(Answers({11: node(0), 12: node(1), 13: node(0)}), 1)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "node 11 (partition 0) and node 13 (partition 0) both claim partition-id=0: give each SuperNode its own in "
        "--node-config."
    )


def test_a_new_node_waits_until_the_holder_of_its_partition_is_gone(nodes: NodeRegistry) -> None:
    """As a SuperNode without a key does that was killed: it comes back under another node id."""
    grid = Answers({11: node(0), 12: node(1)})
    assert [n.node_id for n in nodes.present(grid, 1)] == [11, 12]  # type: ignore[arg-type]
    grid.nodes[13] = node(1)
    assert [n.node_id for n in nodes.present(grid, 1)] == [11, 12]  # type: ignore[arg-type]
    del grid.nodes[12]
    assert [n.node_id for n in nodes.present(grid, 1)] == [11, 13]  # type: ignore[arg-type]
    assert grid.asked == [[11, 12], [13], [13]]


def test_a_node_lost_during_a_query_is_asked_again(nodes: NodeRegistry, caplog) -> None:
    """Its partition matters as soon as it is back; an app that has no answer is taken without one."""
    grid = Answers({11: node(0), 12: ErrorCode.NODE_UNAVAILABLE, 13: ErrorCode.CLIENT_APP_RAISED_EXCEPTION})
    with caplog.at_level(logging.WARNING, logger="flwr"):
        assert [(n.node_id, n.partition_id) for n in nodes.present(grid, 1)] == [(11, 0), (13, None)]  # type: ignore[arg-type]
    assert "node 12 did not say who it is (error 5: lost); asked again later" in caplog.messages
    assert nodes.silent == {12: "error 5: lost"}
    grid.nodes[12] = node(1)
    assert [(n.node_id, n.partition_id) for n in nodes.present(grid, 1)] == [(11, 0), (12, 1), (13, None)]  # type: ignore[arg-type]
    assert nodes.silent == {}
    assert grid.asked == [[11, 12, 13], [12]]


def test_the_reason_why_a_node_cannot_take_part_is_known(nodes: NodeRegistry) -> None:
    grid = Answers({11: node(0), 12: node(1, 0, unusable="no images")})
    assert [n.unusable for n in nodes.present(grid, 1)] == ["", "no images"]  # type: ignore[arg-type]

"""Participants, nodes with the same partition, and nodes without usable data."""

from __future__ import annotations

import functools
import logging
import random
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from fedbn_flwr.client import TorchClient
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import MOD_ON_QUERIES, ConfigError
from fedbn_flwr.messages.protocol import NodeProperties
from fedbn_flwr.server.methods.method import Node
from fedbn_flwr.server.runs.nodes import NodeRegistry
from fedbn_flwr.strategies import FedAvg, FedBN
from tests.support.bad_replies import spoiling

SIZES = (8, 9, 7)


class Answers(InProcessGrid):
    """A grid whose nodes answer the query with given properties or an error code.

    ``asked`` lists the nodes of each query.
    """

    def __init__(self, nodes: Mapping[int, dict[str, Any] | int]) -> None:
        super().__init__(ClientApp(), 1)
        self.nodes = dict(nodes)
        self.asked = []

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def answers_queries(self) -> None:
        return None

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        batch = list(messages)
        self.asked.append([message.metadata.dst_node_id for message in batch])
        return [self._reply(message) for message in batch]

    def _reply(self, message: Message) -> Message:
        said = self.nodes[message.metadata.dst_node_id]
        message.metadata.__dict__.update(_message_id="1", _run_id=1)
        if isinstance(said, int):
            return Message(Error(said, "lost"), reply_to=message)
        texts = {key: value for key, value in said.items() if isinstance(value, str)}
        numbers = {key: value for key, value in said.items() if key not in texts}
        content = RecordDict({"metrics": MetricRecord(numbers)})
        if texts:
            content["properties"] = ConfigRecord(texts)
        return Message(content, reply_to=message)


registry = functools.partial(NodeRegistry, seed=0, timeout=1)


def node(partition: int, examples: int = 5, **more: Any) -> dict[str, Any]:
    return {
        "partition-id": partition,
        "num-examples": examples,
        "batch-size": 1,
        **more,
    }


def present(nodes: NodeRegistry, grid: Answers) -> list[int]:
    """Return the ids of the nodes that a registry finds in round 1."""
    return [one.node_id for one in nodes.present(grid, 1)]


@pytest.fixture
def nodes() -> NodeRegistry:
    return registry(site_names={})


def test_two_nodes_with_one_partition_are_refused_at_the_start(
    nodes: NodeRegistry,
) -> None:
    with pytest.raises(
        ConfigError, match=r"node 11 \(partition 0\) and node 13 .* partition-id=0"
    ):
        present(nodes, Answers({11: node(0), 12: node(1), 13: node(0)}))


def test_nodes_with_parts_of_different_splits_are_refused(caplog) -> None:
    """Their parts share examples.

    A node with its own data reports no number of parts, and the number of an unusable
    node does not matter.
    """
    nodes = registry(num_partitions=0)
    grid = Answers(
        {
            11: node(0, **{"num-partitions": 2}),
            12: node(1, **{"num-partitions": 3}),
            13: node(2),
            14: node(3, 0, unusable="no images", **{"num-partitions": 9}),
        }
    )
    loaded_by_users = registry()
    assert present(loaded_by_users, grid) == [11, 12, 13, 14]
    for refusing, said in (
        (nodes, r"node 11 .* num-partitions=2, but node 12 .* num-partitions=3"),
        (registry(num_partitions=1), "the server has num-partitions=1, but node 11"),
    ):
        with pytest.raises(ConfigError, match=said):
            present(refusing, grid)
    later = grid.nodes.pop(12)
    assert present(nodes, grid) == [11, 13, 14]
    grid.nodes[12] = later
    caplog.clear()
    assert present(nodes, grid) == [11, 13, 14]
    (said,) = caplog.messages
    assert "num-partitions=3" in said
    assert "left out" in said


def test_a_new_node_waits_until_the_holder_of_its_partition_is_gone(
    nodes: NodeRegistry, caplog
) -> None:
    """A killed SuperNode without a key returns with another node id."""
    grid = Answers({11: node(0), 12: node(1)})
    assert present(nodes, grid) == [11, 12]
    grid.nodes[13] = node(1)
    assert present(nodes, grid) == [11, 12]
    del grid.nodes[12]
    with caplog.at_level(logging.INFO, logger="flwr"):
        assert present(nodes, grid) == [11, 13]
    assert caplog.messages[-1] == "node 13 (partition 1) joins the run."
    assert nodes.lost == []
    assert grid.asked == [[11, 12], [13], [13]]


def test_a_node_lost_during_a_query_is_asked_again(nodes: NodeRegistry, caplog) -> None:
    """The node counts when it returns, and an app without an answer is accepted."""
    grid = Answers(
        {
            11: node(0),
            12: ErrorCode.NODE_UNAVAILABLE,
            13: ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
        }
    )
    found = nodes.present(grid, 1)
    assert [(n.node_id, n.partition_id) for n in found] == [(11, 0), (13, None)]
    assert caplog.messages == [
        (
            "node 13: its answer to the query failed: lost. If a mod raised it:"
            f" {MOD_ON_QUERIES}"
        ),
        "node 12 did not answer the query (error 5: lost); it is asked again later",
    ]
    assert nodes.silent == {12: "error 5: lost"}
    grid.nodes[12] = node(1)
    assert present(nodes, grid) == [11, 12, 13]
    assert nodes.node(12).partition_id == 1
    assert nodes.silent == {}
    assert grid.asked == [[11, 12, 13], [12]]


def test_a_reply_may_name_a_partition_that_no_other_node_has(
    nodes: NodeRegistry,
) -> None:
    grid = Answers({11: node(1), 12: {"num-examples": 5}, 13: node(0)})
    nodes.present(grid, 1)
    for said, known in ((-1, None), (0, None), (7, 7)):
        reply = grid._reply(Message(RecordDict(), 12, "train"))
        info = {"partition-id": said, "site-name": "07"}
        reply.content["properties"] = ConfigRecord(info)
        assert nodes.identify_sender(reply).partition_id == known
    assert nodes.names == {"7": "07"}
    assert present(nodes, grid) == [13, 11, 12]


@pytest.mark.parametrize(
    "unusable", ["no images", ""], ids=["unusable", "no training data"]
)
def test_a_node_without_training_data_is_not_trained_and_an_unusable_one_not_tested_either(
    federate_mlp, unusable: str
) -> None:
    """The server does not request its statistics."""

    def tell(content: RecordDict) -> None:
        content.clear()
        content.update(NodeProperties(1, 0, 1, unusable).write())

    wrap = spoiling(tell, kind="query")
    run = federate_mlp(FedAvg(recalibrate=True), rounds=2, wrap=wrap)
    tested = {0, 2} if unusable else {0, 1, 2}
    for kind, asked in (
        ("query", {0, 1, 2}),
        ("train", {0, 2}),
        ("query.statistics", {0, 2}),
        ("evaluate", tested),
    ):
        nodes = [m.metadata.dst_node_id for m in run.grid.of(kind)]
        assert {*map(run.grid.partition, nodes)} == asked, kind
    for report in run.reports:
        assert report.participants == [0, 2]
        assert list(report.evaluations) == [str(i) for i in tested]
        reasons = [why.partition(": ")[2] for why in report.rejected.values()]
        assert reasons == [unusable] * bool(unusable)


@pytest.mark.parametrize("seed", range(10))
def test_each_asked_client_takes_part_or_is_missing(
    federate, mlp, points, seed: int
) -> None:
    """Clients come, leave and fail at random. The last client has no training data."""
    draw, rounds = random.Random(seed), range(1, 6)
    fraction, of_tests = draw.choices([0.0, 0.25, 0.5, 1.0], k=2)
    least, least_tests = draw.choices([1, 2, 3], k=2)
    hidden = {number: draw.sample(range(5), 2) for number in rounds}
    failing = [(number, draw.randrange(4)) for number in rounds]

    class Failing(TorchClient):
        def fit(self, parameters, config):
            if (config["server-round"], self.partition_id) in failing:
                raise RuntimeError("disk full")
            return super().fit(parameters, config)

    strategy = FedAvg(
        fraction_train=fraction,
        fraction_evaluate=of_tests,
        min_train_nodes=least,
        min_evaluate_nodes=least_tests,
    )
    data = [points(8, i) for i in range(4)] + [points(0)]
    run = federate(strategy, mlp, data, rounds=5, hide=hidden, client=Failing)
    seen = set()
    tests = 0
    for report in run.reports:
        here = {*range(4)} - {*hidden[report.server_round]}
        seen |= here
        asked, expected = (
            min(max(int(fraction * len(them)), least), len(them)) * bool(fraction)
            for them in (here, seen)
        )
        assert (report.asked, report.expected) == (asked, expected * bool(asked))
        used, missing = {*map(str, report.participants)}, {*report.missing}
        lost = {*map(str, seen - here)} if asked else set()
        assert used.isdisjoint(missing)
        assert lost <= missing
        assert len(used) + len(report.missing) == asked + len(lost)
        assert bool(report.absences({})) == (len(used) < report.expected)
        tests += max(int(of_tests * 3), least_tests) if of_tests else 0
    assert len(run.grid.of("evaluate")) == tests


@pytest.mark.parametrize("make", [FedAvg, FedBN])
@pytest.mark.parametrize("seed", range(3))
def test_each_client_tested_before_its_first_training_is_named_once(
    federate, mlp, points, caplog, make, seed: int
) -> None:
    """Only a method with local state has an untrained state to test."""
    data = [points(8, i) for i in range(5)]
    run = federate(make(fraction_train=0.4, seed=seed), mlp, data, rounds=4)
    told = [line for line in caplog.messages if "before the first training" in line]
    trained, named, lines = set(), set(), []
    for report in run.reports:
        trained |= {*map(str, report.participants)}
        new = {*report.evaluations} - trained - named
        if new and make is FedBN:
            lines.append(new)
        named |= new
    assert named
    partitions = [{*re.findall(r"partition (\d)", line)} for line in told]
    assert partitions == lines


def test_those_who_are_drawn_stay_in_the_order_of_all(nodes: NodeRegistry) -> None:
    """The sums of floats depend on the order."""
    everyone = [Node(100 - i, partition_id=i, num_examples=5) for i in range(6)]
    found = set()
    for number in range(20):
        drawn = nodes.sample(everyone, 3, "train", number)
        places = tuple(map(everyone.index, drawn))
        assert list(places) == sorted(places)
        found.add(places)
    assert len(found) > 5


@pytest.mark.parametrize("seed", range(20))
def test_the_list_of_initialised_nodes_is_exact_after_any_chain_of_resumes(
    seed: int,
) -> None:
    """Node ids are new after a resume.

    Some nodes are away, train for the first time, or lose their part.
    """
    draws = random.Random(seed)
    partitions = range(5)
    begun = set()
    for resume in range(6):
        registry = NodeRegistry(seed=0, timeout=0.05)
        registry.expect_initialised(map(str, begun))
        ids = {partition: 100 * resume + partition for partition in partitions}
        for _ in range(draws.randrange(4)):
            here = [i for i in partitions if draws.random() < 0.6]
            grid = Answers({ids[i]: node(i) for i in here})
            found = [one.node_id for one in registry.present(grid, 0)]
            for partition in here:
                node_id = ids[partition]
                assert node_id in found
                assert (node_id in registry.initialised) == (partition in begun)
                what = draws.choice(["trains", "loses its part", "neither"])
                if what == "trains":
                    registry.initialised.add(node_id)
                    begun.add(partition)
                elif what == "loses its part":
                    registry.initialised.discard(node_id)
                    begun.discard(partition)
            assert registry.initialised_labels == sorted(map(str, begun))


def test_nodes_have_their_own_names_or_those_of_the_data(caplog) -> None:
    """The number identifies a node, so two nodes may share a name."""
    of_data = {"0": "north", "1": "south", "2": "west", "3": "east"}
    part = {"num-partitions": 4}
    said = {
        11: node(0, **part),
        12: node(1, **part, **{"site-name": "07"}),
        13: node(2, **{"site-name": "7"}),
        14: node(3),
        15: node(4, **{"site-name": "07"}),
        16: node(5, **{"site-name": "a): \x1b[2J"}),
    }
    named = registry(site_names=of_data)
    found = named.present(Answers(said), 1)
    assert [each.name for each in found] == ["north", "07", "7", "", "07", ""]
    assert named.with_names(["0", "2", "3"]) == ["0 (north)", "2 (7)", "3"]
    assert str(found[1]) == "node 12 (partition 1, 07)"
    (refused,) = caplog.messages
    assert refused.startswith("node 16 (partition 5): its site-name is ignored: ")
    assert "U+001B" in refused
    unnamed = registry()
    assert not any(each.name for each in unnamed.present(Answers(said), 1))

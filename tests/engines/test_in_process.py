"""To a strategy, the in-process engine behaves like Flower's Grid."""

from __future__ import annotations

import copy
import inspect
import random
import threading
import time
from collections.abc import Callable
from queue import Empty
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import (
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.engines.client_work import kind_of_work
from fedbn_flwr.errors import EngineError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.transport import Barrier, Member
from fedbn_flwr.transport.turns import Wait
from tests.support.in_process import answer, app_of, echo, to


@pytest.fixture
def open_grid(open_grid) -> Callable[..., InProcessGrid]:
    """Provide ``open_grid(handler=echo, num_nodes=3, ...)`` to open a grid.

    The handler answers every message.
    """
    return lambda handler=echo, num_nodes=3, **options: open_grid(
        app_of(handler), num_nodes, **options
    )


def test_the_grid_has_the_calls_of_flowers_grid() -> None:
    assert issubclass(InProcessGrid, Grid)
    for name in Grid.__abstractmethods__:
        theirs = getattr(Grid, name)
        if callable(theirs):
            ours = inspect.signature(getattr(InProcessGrid, name)).parameters
            # from Flower 1.43 on
            newer = {"reply_to_message_ids"} if name == "pull_messages" else set()
            assert {*ours} == {*inspect.signature(theirs).parameters} | newer, name


def test_nodes_have_the_same_ids_and_contexts_as_in_flower(open_grid) -> None:
    grid = open_grid(
        num_nodes=5, run_config={"x": 1}, node_configs=[{"city": c} for c in "abcde"]
    )
    ids = grid.get_node_ids()
    assert len(set(ids)) == 5
    assert all(0 < node_id < 2**63 for node_id in ids)
    for partition, node_id in enumerate(ids):
        own = {"num-partitions": 5, "city": "abcde"[partition]}
        node = {"partition-id": partition, **own}
        wanted = Context(grid.run.run_id, node_id, node, RecordDict(), {"x": 1})
        assert grid.context(partition) == wanted
    assert open_grid(num_nodes=5, seed=1).get_node_ids() != ids
    assert open_grid(num_nodes=5).get_node_ids() == ids
    with pytest.raises(
        EngineError, match=r"^num_nodes=0 is not allowed: use 1 or more$"
    ):
        open_grid(num_nodes=0)


@pytest.mark.parametrize(
    "pull",
    [
        lambda grid, ids: grid.pull_messages(message_ids=ids),  # before Flower 1.43
        lambda grid, ids: grid.pull_messages(reply_to_message_ids=ids),
        lambda grid, ids: grid.pull_messages(),
    ],
)
def test_push_and_pull(open_grid, pull: Callable[..., list[Message]]) -> None:
    gate = threading.Event()

    def wait(message: Message, context: Context) -> Message:
        gate.wait(20)
        return echo(message)

    grid = open_grid(wait)
    ids, got = grid.push_messages(to(grid, 0, 1)), []
    assert grid.pull_messages(ids) == []
    gate.set()
    while len(got) < 2:
        got += [message.metadata.reply_to_message_id for message in pull(grid, ids)]
    assert sorted(got) == sorted(ids)
    assert grid.pull_messages(ids) == [], "each reply is handed out once"
    assert grid.pull_messages(["unknown"]) == []
    first, second = grid.push_messages(to(grid, 0, 0))
    while not grid.pull_messages([second]):
        pass  # One node answers its messages in turn, so the first reply waits.
    assert grid.pull_messages([]) == grid.pull_messages(reply_to_message_ids=[]) == []
    assert len(grid.pull_messages([first])) == 1


@pytest.mark.parametrize("unit", [1e-3, 1, 1e3])
def test_clients_that_take_much_longer_start_first(open_grid, unit: float) -> None:
    """The median is 1.5. The time of the last client is unknown."""
    started = []

    def work(message: Message, context: Context) -> Message:
        started.append(context.node_config["partition-id"])
        return echo(message)

    grid = open_grid(work, num_nodes=8)
    messages = to(grid, *range(8))
    for at, seconds in enumerate((1, 1.1, 1.5, 0.2, 3, 2.9, 10)):
        grid._host.seconds[kind_of_work(messages[at])] = seconds * unit
    grid.send_and_receive(messages)
    assert started == [6, 4, 5, 0, 1, 2, 3, 7]


def test_create_message_and_unknown_nodes(open_grid) -> None:
    grid = open_grid()
    message = grid.create_message(RecordDict(), MessageType.QUERY, 12345, "g", 9.0)
    assert (message.metadata.group_id, message.metadata.ttl) == ("g", 9.0)
    with pytest.raises(
        EngineError, match=r"^node 12345 is not one of the 3 nodes of this grid"
    ):
        grid.push_messages([message])


def test_changes_of_an_app_to_its_records_are_not_seen_outside(open_grid) -> None:
    def spoil(message: Message, context: Context) -> Message:
        message.content["config"]["round"] = -1
        message.content["arrays"].clear()
        return answer(message)

    grid = open_grid(spoil)
    records = {
        "arrays": to_record({"x": np.ones(1)}),
        "config": ConfigRecord({"round": 1}),
    }
    content = RecordDict(records)
    grid.send_and_receive(to(grid, 0, 1, content=content))
    assert content["config"]["round"] == 1
    assert list(content["arrays"]) == ["x"]


def change(context: Context, order: str, value: int) -> None:
    """Change a context as an app may do it."""
    if order == "put":
        context.state[f"r{value % 3}"] = MetricRecord({"n": value})
    elif order == "extend":  # in a record that is there
        for record in context.state.config_records.values():
            record["all"].append(value)
        context.state.setdefault("c", ConfigRecord({"all": [value]}))
    elif order == "clear":
        context.state.clear()
    elif order in ("node_config", "run_config"):
        getattr(context, order)["found"] = value
    elif order == "attribute":
        context.found = value  # type: ignore[attr-defined]
    elif order == "leave nothing":
        context.state.clear()
        for own in (context.node_config, context.run_config, vars(context)):
            own.pop("found", None)


def left(context: Context) -> str:
    """Return everything that a context has, as a text."""
    records = {key: dict(record) for key, record in sorted(context.state.items())}
    others = {name: value for name, value in vars(context).items() if name != "state"}
    return f"{records} {sorted(others.items())}"


ORDERS = ["put", "extend", "clear", "nothing"]
ORDERS += ["leave nothing", "attribute", "node_config", "run_config"]


@pytest.mark.parametrize(("workers", "threads"), [(0, 1), (0, 3), (2, 1)])
def test_the_next_context_is_what_the_app_left_unless_it_failed(
    open_grid, workers: int, threads: int
) -> None:
    """The orders are random, and a node may get several messages together."""

    def work(message: Message, context: Context) -> Message:
        found = left(context)
        order = message.content["order"]
        change(context, order["what"], order["value"])
        if order["fails"]:
            raise RuntimeError("after its change")
        order["found"] = found
        return echo(message)

    draw = random.Random(workers + threads)
    grid = open_grid(work, workers=workers, threads=threads)
    right = [copy.deepcopy(grid.context(i)) for i in range(3)]
    for _ in range(60):
        sent, expected = [], []
        for value in range(draw.randint(1, 6)):
            i, fails = draw.randrange(3), draw.random() < 0.2
            what = draw.choice(ORDERS)
            order = ConfigRecord({"what": what, "value": value, "fails": fails})
            sent += to(grid, i, content=RecordDict({"order": order}))
            expected.append("" if fails else left(right[i]))
            if not fails:
                change(right[i], what, value)
        found = [
            r.content["order"]["found"] if r.has_content() else ""
            for r in grid.send_and_receive(sent)
        ]
        assert found == expected
        assert [left(grid.context(i)) for i in range(3)] == list(map(left, right))


def test_at_the_timeout_ready_replies_are_returned_and_late_ones_ignored(
    open_grid,
) -> None:
    gate = threading.Event()

    def slow(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1 and not gate.is_set():
            with Wait():
                gate.wait(5)
        return echo(message)

    grid = open_grid(slow, threads=3)
    nodes, start = grid.get_node_ids(), time.monotonic()
    replies = grid.send_and_receive(to(grid, 0, 1, 2), timeout=0.5)
    assert time.monotonic() - start >= 0.5
    assert [r.metadata.src_node_id for r in replies] == [nodes[0], nodes[2]]
    assert not grid._waiting
    gate.set()
    time.sleep(0.05)
    again = to(grid, 0, 1, content=RecordDict({"second": ConfigRecord()}))
    replies = grid.send_and_receive(again, timeout=5)
    # A late reply to another message would have no record.
    found = [(r.metadata.src_node_id, [*r.content]) for r in replies]
    assert found == [(node_id, ["second"]) for node_id in nodes[:2]]


@pytest.mark.parametrize(
    ("reading", "got", "end"),
    [(0.0, [1], 2.0), (1.25, [1], 2.75), (3.0, [1, 2, 3], 10.5)],
)
def test_a_timeout_bounds_all_replies_together(
    open_grid, monkeypatch, reading: float, got: list[int], end: float
) -> None:
    """A reply arrives every 1.5 seconds, so after two seconds one of three has come.

    The server may still read it then. It takes the replies that arrived meanwhile.
    """
    grid, now, replies = open_grid(), 0.0, iter([(1.5, "a"), (3, "b"), (4.5, "c")])

    class Slow:
        def get(self, timeout: float) -> str:
            nonlocal now
            assert timeout >= 0, "a queue refuses it"
            arrival, reply = next(replies)
            now = min(now + timeout, max(now, arrival))
            if now < arrival:
                raise Empty
            return reply

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("fedbn_flwr.engines.in_process.time", clock)
    grid._ready.update({"a": 1, "b": 2, "c": 3})
    found = []
    for reply in grid._arrivals("abc", Slow(), 2.0):
        found.append(reply)
        now += reading
    assert (found, now) == (got, end)


def test_closing_waits_for_the_members_of_a_step_that_is_over() -> None:
    """Otherwise they would draw from the generators of later code."""
    before, began = torch.get_rng_state(), threading.Event()

    def work(message: Message, context: Context) -> Message:
        began.set()
        time.sleep(0.5)
        torch.rand(1)
        return answer(message)

    with InProcessGrid(app_of(work), 1) as grid:
        (node,) = grid.get_node_ids()
        grid.open_barrier("over", Barrier({node: Member(1, 1, "a node")}, 5))
        grid.push_messages(to(grid, 0))
        assert began.wait(5)
        grid.close_barrier("over")
    assert not any(thread.name.startswith("client") for thread in threading.enumerate())
    assert torch.equal(torch.get_rng_state(), before)

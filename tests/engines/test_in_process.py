"""To a strategy, the in-process engine behaves like Flower's Grid."""

from __future__ import annotations

import copy
import inspect
import itertools
import random
import threading
import time
from collections.abc import Callable

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
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid, client_work
from fedbn_flwr.errors import EngineError
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.randomness import interrupted
from fedbn_flwr.transport import Barrier, Member
from fedbn_flwr.transport.polling_grid import PollingGrid
from fedbn_flwr.transport.step_transport import send_until
from tests.support.fast import fast
from tests.support.federation import torch_clients

Handler = Callable[[Message, Context], Message]
Open = Callable[..., InProcessGrid]


def app_of(handler: Handler) -> ClientApp:
    """Return an app that answers every kind of message with ``handler``."""
    app = ClientApp()
    for register in (app.train(), app.evaluate(), app.query()):
        register(handler)
    return app


def echo(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


@pytest.fixture
def open_grid(open_grid: Open) -> Open:
    """Provide ``open_grid(handler=echo, num_nodes=3, ...)`` to open a grid.

    The handler answers every message.
    """
    return lambda handler=echo, num_nodes=3, **options: open_grid(
        app_of(handler), num_nodes, **options
    )


def to(
    grid: InProcessGrid,
    *partitions: int,
    kind: str = MessageType.TRAIN,
    content: RecordDict | None = None,
) -> list:
    nodes = grid.get_node_ids()
    return [Message(content or RecordDict(), nodes[i], kind) for i in partitions]


def test_the_grid_has_the_calls_of_flowers_grid() -> None:
    assert issubclass(InProcessGrid, Grid)
    for name in Grid.__abstractmethods__:
        ours, theirs = getattr(InProcessGrid, name), getattr(Grid, name)
        if callable(theirs):
            mine = set(inspect.signature(ours).parameters)
            others = set(inspect.signature(theirs).parameters)
            # from Flower 1.43 on
            newer = {"reply_to_message_ids"} if name == "pull_messages" else set()
            assert mine == others | newer, name


def test_nodes_have_the_same_ids_and_contexts_as_in_flower(open_grid) -> None:
    grid = open_grid(
        num_nodes=5, run_config={"x": 1}, node_configs=[{"city": c} for c in "abcde"]
    )
    ids = list(grid.get_node_ids())
    assert len(set(ids)) == 5
    assert all(0 < node_id < 2**63 for node_id in ids)
    for partition, node_id in enumerate(ids):
        context = grid.context(partition)
        assert (context.node_id, context.run_id) == (node_id, grid.run.run_id)
        assert context.node_config == {
            "partition-id": partition,
            "num-partitions": 5,
            "city": "abcde"[partition],
        }
        assert context.run_config == {"x": 1}
    assert list(open_grid(num_nodes=5, seed=1).get_node_ids()) != ids
    assert list(open_grid(num_nodes=5).get_node_ids()) == ids
    with pytest.raises(
        EngineError, match=r"^num_nodes=0 is not allowed: use 1 or more$"
    ):
        open_grid(num_nodes=0)


def test_messages_arrive_and_replies_come_back(open_grid) -> None:
    seen: list[Message] = []

    def note(message: Message, context: Context) -> Message:
        seen.append(message)
        return echo(message, context)

    grid = open_grid(note)
    sent = to(grid, 2, 0, content=RecordDict({"a": to_record({"x": np.arange(3.0)})}))
    replies = grid.send_and_receive(sent)
    assert [r.metadata.src_node_id for r in replies] == [
        m.metadata.dst_node_id for m in sent
    ]
    assert [r.metadata.reply_to_message_id for r in replies] == [
        m.metadata.message_id for m in seen
    ]
    ids = [m.metadata.message_id for m in seen + replies]
    assert len(set(ids)) == 4
    assert all(ids)
    assert all(m.metadata.run_id == grid.run.run_id for m in seen)
    assert from_record(replies[0].content["a"])["x"].tolist() == [0, 1, 2]


PULLS: dict[str, Callable[[InProcessGrid, list[str]], list[Message]]] = {
    "by place": lambda grid, ids: grid.pull_messages(ids),
    "by the name before Flower 1.43": lambda grid, ids: grid.pull_messages(
        message_ids=ids
    ),
    "by the name since": lambda grid, ids: grid.pull_messages(reply_to_message_ids=ids),
    "all": lambda grid, ids: grid.pull_messages(),
}


@pytest.mark.parametrize("asked", PULLS)
def test_push_and_pull(open_grid, asked: str) -> None:
    gate = threading.Event()

    def wait(message: Message, context: Context) -> Message:
        gate.wait(5)
        return echo(message, context)

    grid = open_grid(wait)
    ids = grid.push_messages(to(grid, 0, 1))
    assert grid.pull_messages(ids) == []
    gate.set()
    deadline, got = time.monotonic() + 5, []
    while len(got) < 2 and time.monotonic() < deadline:
        got += PULLS[asked](grid, ids)
    assert sorted(m.metadata.reply_to_message_id for m in got) == sorted(ids)
    assert grid.pull_messages(ids) == [], "each reply is handed out once"
    assert grid.pull_messages(["unknown"]) == []
    first, second = grid.push_messages(to(grid, 0, 0))
    while not grid.pull_messages([second]) and time.monotonic() < deadline:
        pass  # One node answers its messages in turn, so the first reply waits.
    assert grid.pull_messages([]) == grid.pull_messages(reply_to_message_ids=[]) == []
    assert len(grid.pull_messages([first])) == 1


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
        return Message(RecordDict(), reply_to=message)

    grid = open_grid(spoil)
    content = RecordDict(
        {"arrays": to_record({"x": np.ones(1)}), "config": ConfigRecord({"round": 1})}
    )
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


ORDERS = (
    *("put", "extend", "clear", "nothing"),
    *("leave nothing", "attribute", "node_config", "run_config"),
)


@pytest.mark.parametrize(("workers", "threads"), [(0, 1), (0, 3), (2, 1)])
def test_the_next_context_is_what_the_app_left_unless_it_failed(
    open_grid, workers: int, threads: int
) -> None:
    """The orders are random, and a node may get several messages together."""

    def work(message: Message, context: Context) -> Message:
        found = left(context)
        order = message.content["order"]
        change(context, str(order["what"]), int(order["value"]))
        if order["fails"]:
            raise RuntimeError("after its change")
        return Message(
            RecordDict({"found": ConfigRecord({"found": found})}), reply_to=message
        )

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
            str(r.content["found"]["found"]) if r.has_content() else ""
            for r in grid.send_and_receive(sent)
        ]
        assert found == expected
        assert [left(grid.context(i)) for i in range(3)] == list(map(left, right))


def test_an_error_of_the_app_is_a_reply_of_its_node(open_grid) -> None:
    def fail(message: Message, context: Context) -> Message:
        raise ValueError("no such city: 'X'")

    grid = open_grid(fail)
    (reply,) = grid.send_and_receive(to(grid, 1))
    assert reply.error.code == 2
    assert "no such city: 'X'" in reply.error.reason
    assert reply.metadata.src_node_id == grid.get_node_ids()[1]
    assert reply.metadata.message_id


def test_at_the_timeout_ready_replies_are_returned_and_late_ones_ignored(
    open_grid,
) -> None:
    gate = threading.Event()

    def slow(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1 and not gate.is_set():
            with interrupted():
                gate.wait(5)
        return echo(message, context)

    grid = open_grid(slow, threads=3)
    start = time.monotonic()
    replies = grid.send_and_receive(to(grid, 0, 1, 2), timeout=0.2)
    assert 0.2 <= time.monotonic() - start < 1
    nodes = grid.get_node_ids()
    assert [r.metadata.src_node_id for r in replies] == [nodes[0], nodes[2]]
    assert not grid._waiting
    gate.set()
    time.sleep(0.05)
    again = to(grid, 0, 1, content=RecordDict({"second": ConfigRecord()}))
    replies = grid.send_and_receive(again, timeout=5)
    assert [r.metadata.src_node_id for r in replies] == nodes[:2]
    assert all("second" in r.content for r in replies), (
        "a late reply came back for another message"
    )


SLOW = {"five hang": [60.0] * 5, "ten in turn": [0.3] * 10}


@pytest.mark.parametrize("seconds", SLOW.values(), ids=SLOW)
@pytest.mark.parametrize("around", fast([lambda grid: grid, PollingGrid], 0))
@pytest.mark.parametrize("workers", [0, 2])
def test_a_call_ends_at_its_timeout_and_names_the_slow_clients(
    workers: int, around: Callable[[Grid], Grid], seconds: list[float], mlp, points
) -> None:
    """This applies even if each client needs less than the timeout."""
    end = threading.Event()
    timeout = 0.5

    class Slow(TorchClient):
        def fit(self, parameters, config):
            end.wait([0.0, *seconds][self.partition_id])
            return super().fit(parameters, config)

    app = client_app(
        torch_clients(
            mlp,
            [points(4, i) for i in range(1 + len(seconds))],
            LocalTraining(learning_rate=LearningRate(0.1), local_steps=1),
            client=Slow,
        )
    )
    strategy = FedAvg(fraction_evaluate=0.0)
    with InProcessGrid(app, 1 + len(seconds), workers=workers) as grid:
        start = time.monotonic()
        strategy.start(
            around(grid), to_record(mlp().state_dict()), num_rounds=1, timeout=timeout
        )
        assert time.monotonic() - start < 2.0
        end.set()
    (report,) = strategy.reports
    nodes = grid.get_node_ids()
    named = {nodes.index(node) for node in report.rejected}
    assert sorted([*report.participants, *named]) == list(range(1 + len(seconds)))
    # In one process, only one client computes at a time, in the order of the
    # partitions.
    ends = seconds if workers else list(itertools.accumulate(seconds))
    assert {i for i, at in enumerate(ends, 1) if at > timeout} <= named
    assert 0 not in named
    assert all("no reply within 0.5 s" in why for why in report.rejected.values())


@pytest.mark.parametrize("median", [1e-3, 1.0, 100.0])
def test_only_clients_that_take_much_longer_start_out_of_order(
    open_grid, median: float
) -> None:
    """Clients with about the same time, or with an unknown time, keep their order."""
    begun = []

    def work(message: Message, context: Context) -> Message:
        begun.append(context.node_config["partition-id"])
        return echo(message, context)

    grid = open_grid(work, num_nodes=8)
    nodes = grid.get_node_ids()
    for partition, ratio in {1: 0.2, 2: 1.1, 4: 2.0, 5: 5.0, 6: 0.9, 7: 1.0}.items():
        grid._host.seconds[nodes[partition], MessageType.TRAIN] = ratio * median
    grid.send_and_receive(to(grid, *range(8)))
    assert begun == [5, 4, 0, 1, 2, 3, 6, 7]


def test_a_step_is_polled_for_its_replies_and_not_in_between(monkeypatch) -> None:
    polls = []
    pull = InProcessGrid.pull_messages

    def work(message: Message, context: Context) -> Message:
        time.sleep(0.25 * (1 + context.node_config["partition-id"]))
        return Message(RecordDict(), reply_to=message)

    monkeypatch.setattr(
        InProcessGrid,
        "pull_messages",
        lambda grid, ids: polls.append(1) or pull(grid, ids),
    )
    with InProcessGrid(app_of(work), 2) as grid:
        replies = send_until(grid, to(grid, 0, 1), lambda replies, seconds: False)
    assert len(replies) == 2
    assert len(polls) < 15


def test_members_of_the_next_step_use_the_same_threads() -> None:
    """The threads keep the memory of their tensors, even a member that hangs."""
    hang, used = threading.Event(), set()

    def work(message: Message, context: Context) -> Message:
        used.add(threading.current_thread())
        if context.node_config["partition-id"] == 3:
            with interrupted():
                hang.wait(10)
        return Message(RecordDict(), reply_to=message)

    with InProcessGrid(app_of(work), 4) as grid:
        for partitions in [(3,), *[(0, 1, 2)] * 10]:
            messages = to(grid, *partitions)
            members = {m.metadata.dst_node_id: Member(1, 1, "a") for m in messages}
            grid.open_barrier("step", Barrier(members, 5))
            if partitions == (3,):
                grid.push_messages(messages)
            else:
                assert len(grid.send_and_receive(messages, timeout=5)) == 3
            grid.close_barrier("step")
        hang.set()
    assert len(used) < 12


def test_closing_waits_for_the_members_of_a_step_that_is_over() -> None:
    """Otherwise they would draw from the generators of later code."""
    before, began = torch.get_rng_state(), threading.Event()

    def work(message: Message, context: Context) -> Message:
        began.set()
        time.sleep(0.5)
        torch.rand(1)
        return Message(RecordDict(), reply_to=message)

    with InProcessGrid(app_of(work), 1) as grid:
        (message,) = to(grid, 0)
        grid.open_barrier(
            "over", Barrier({message.metadata.dst_node_id: Member(1, 1, "a node")}, 5)
        )
        grid.push_messages([message])
        assert began.wait(5)
        grid.close_barrier("over")
    assert not any(thread.name.startswith("client") for thread in threading.enumerate())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_waits_for_its_node_is_dropped_where_the_grid_closes(
    monkeypatch,
) -> None:
    """A node may end its message while another node's message is taken."""
    worked: list[int] = []
    pushed, ended = threading.Event(), threading.Event()

    def work(message: Message, context: Context) -> Message:
        pushed.wait(20)
        worked.append(context.node_config["partition-id"])
        return Message(RecordDict(), reply_to=message)

    grid, hand_over = InProcessGrid(app_of(work), 3), client_work._hand_over
    closing = threading.Thread(target=grid.close)

    def after_the_close(*arguments: object) -> None:
        closing.start()
        ended.set()
        while not grid._host._threads._shutdown:
            time.sleep(0.01)
        monkeypatch.undo()
        hand_over(*arguments)

    monkeypatch.setattr(client_work, "_hand_over", after_the_close)
    grid.push_messages(to(grid, 0, 0, 1, 2))
    pushed.set()
    ended.wait(20)
    closing.join(20)
    assert worked == [0, 1]


def test_a_thread_whose_job_another_one_took_takes_no_turn(monkeypatch) -> None:
    """An empty turn would reset the generators while the caller draws."""
    process = client_work.OwnProcess(app_of(echo), torch_threads=1, threads=2)
    turns: list[None] = []
    real = client_work.one_after_the_other
    monkeypatch.setattr(
        client_work, "one_after_the_other", lambda: turns.append(None) or real()
    )
    process._working = 1  # begun for a job that is gone
    process._work_on_jobs()
    process.close()
    assert (turns, process._working) == ([], 0)

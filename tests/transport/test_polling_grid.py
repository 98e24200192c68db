"""PollingGrid wraps a Grid that behaves like Flower's grids."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest
from flwr.app import Error, Message, MessageType, RecordDict

from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import EngineError
from fedbn_flwr.transport import polling_grid
from fedbn_flwr.transport.polling_grid import PollingGrid, polling


class SlowGrid(InProcessGrid):
    """A grid of the nodes 4, 5, ... that replies after some polls.

    Nodes in ``lost`` give an error reply from node 1, and nodes in ``silent`` give no
    reply.
    """

    def __init__(
        self, polls: int = 1, lost: Iterable[int] = (), silent: Iterable[int] = ()
    ) -> None:
        self.polls, self.lost, self.silent = polls, set(lost), set(silent)
        self.pushed = {}
        self.asked = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        batch = list(messages)
        for message in batch:
            name = f"message-{len(self.pushed)}"
            message.metadata.__dict__["_message_id"] = name
            self.pushed[name] = message
        return [*self.pushed][-len(batch) :]

    def pull_messages(self, message_ids: Iterable[str] = ("all",)) -> list[Message]:
        self.asked.append(list(message_ids))
        if len(self.asked) < self.polls or self.asked[-1] == ["all"]:
            return []
        replies = []
        for i in reversed(self.asked[-1]):
            message = self.pushed[i]
            node_id = message.metadata.dst_node_id
            if node_id in self.lost:
                reply = Message(Error(5, "Node unavailable"), reply_to=message)
                reply.metadata.__dict__["_src_node_id"] = 1
                replies.append(reply)
            elif node_id not in self.silent:
                replies.append(Message(RecordDict(), reply_to=message))
        return replies


class Clock:
    """A clock whose seconds pass only in the pauses of a wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.pauses, self.network = 0.0, [], False
        monkeypatch.setattr(polling_grid, "over_network", lambda grid: self.network)
        monkeypatch.setattr(polling_grid, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def messages(*node_ids: int) -> list[Message]:
    return [Message(RecordDict(), node_id, MessageType.TRAIN) for node_id in node_ids]


def sources(replies: Iterable[Message]) -> dict[int, bool]:
    """Return the node of each reply, and whether it is an error."""
    return {r.metadata.src_node_id: r.has_error() for r in replies}


def test_replies_are_mapped_to_nodes_lost_ones_included(clock) -> None:
    grid = SlowGrid(polls=12, lost=[5])
    replies = PollingGrid(grid).send_and_receive(iter(messages(4, 5, 6)))
    assert sources(replies) == {4: False, 5: True, 6: False}
    assert len(grid.asked) == 12
    assert clock.pauses[0] == 0.002
    assert 0.01 < clock.pauses[-1] < 0.25


@pytest.mark.parametrize("network", [True, False])
def test_nodes_that_do_not_answer_are_named_over_a_network_before_the_timeout(
    network: bool, clock, caplog
) -> None:
    clock.network = network
    inner = SlowGrid(silent=[5, 7])
    grid = PollingGrid(inner)
    grid.name_nodes({5: "node 5 (partition 1)"})
    with caplog.at_level(logging.INFO, logger="flwr"):
        replies = grid.send_and_receive(messages(4, 5, 6, 7), timeout=100)
    assert sources(replies) == {4: False, 6: False}
    assert clock.now == pytest.approx(100)
    assert inner.asked[-1] == ["message-1", "message-3"]
    silent = "node 5 (partition 1), node 7"
    assert caplog.text.count(f"waiting for {silent}. A") == network
    said = f"No reply within 100 s from {silent}; continuing without them."
    assert caplog.messages[-1] == said


def test_it_does_not_wait_for_more_replies_than_are_enough(clock) -> None:
    replies = PollingGrid(SlowGrid(silent=[5, 7])).send_and_receive_until(
        messages(4, 5, 6, 7), lambda own: len(own) == 2, timeout=60
    )
    assert sources(replies) == {4: False, 6: False}
    assert clock.pauses == [0.002]


@pytest.mark.parametrize("takes", [0.05, 1.0, 7.0, 40.0, 3600.0])
def test_over_a_network_few_polls_find_a_reply_soon(takes: float, clock) -> None:
    """The delay is a sixteenth of the time since sending, within 0.1 s and 5 s."""
    clock.network = True

    class Timed(SlowGrid):
        def pull_messages(self, message_ids):
            passed = clock.now - sent
            self.silent = {node_id for node_id in due if passed < due[node_id]}
            replies = super().pull_messages(message_ids)
            came.extend([passed] * bool(replies))
            # the seconds of a pull must not count as the wait for a reply
            clock.now += pulls * len(replies)
            return replies

    inner = Timed(polls=0)
    grid, came, pulls = PollingGrid(inner), [], takes / 100
    for scale in (1.0, 1.1, 0.9, 0.5, 2.0):
        last, sent = 1.2 * takes * scale, clock.now
        due = {4: takes * scale, 5: last}
        inner.asked.clear()
        assert len(list(grid.send_and_receive(messages(4, 5)))) == 2
        found = came[-1]
        delay = max(0.1, min(5.0, (last + pulls) / 16))
        assert last <= found <= last + pulls + delay + 1e-6
        assert len(inner.asked[-1]) <= len(inner.asked[0]), "only outstanding messages"
        # 16 polls within 1.6 s, then a sixteenth more at each poll, up to 80 s
        assert len(inner.asked) <= 85 + last / 5


def test_a_reply_to_another_message_is_left_out_and_named(caplog) -> None:
    class Strange(SlowGrid):
        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            replies[0].metadata.__dict__["_reply_to_message_id"] = ""
            return replies

    grid = PollingGrid(Strange(lost=[4]))
    assert grid.send_and_receive(messages(4), timeout=0.05) == []
    assert "ignored (error 5: Node unavailable)." in caplog.text


@pytest.mark.parametrize("no_id", [None, ""])  # before Flower 1.43, and since
def test_messages_that_could_not_be_pushed_are_named(no_id: str | None, caplog) -> None:

    class Refusing(SlowGrid):
        def push_messages(self, messages):
            ids = super().push_messages(messages)
            return [ids[0], no_id] if len(ids) == 2 else []

    with caplog.at_level(logging.WARNING, logger="flwr"):
        replies = PollingGrid(Refusing()).send_and_receive(messages(4, 5), timeout=1)
    assert sources(replies) == {4: False}
    assert caplog.messages == [
        "Messages to node(s) 5 could not be pushed; continuing without them."
    ]
    with pytest.raises(EngineError, match=r"^only 0 of 3 messages could be sent"):
        PollingGrid(Refusing()).send_and_receive(messages(4, 5, 6), timeout=1)


def test_replies_are_pulled_under_the_names_of_all_versions() -> None:
    inner = SlowGrid()
    grid = PollingGrid(inner)
    ids = grid.push_messages(messages(9))
    pulls = grid.pull_messages
    for pulled in (pulls(ids), pulls(message_ids=ids), pulls(reply_to_message_ids=ids)):
        assert sources(pulled) == {9: False}
    assert pulls() == []
    assert inner.asked == [list(ids)] * 3 + [["all"]]


def test_a_polling_grid_is_not_wrapped_again() -> None:
    grid = PollingGrid(SlowGrid())
    assert polling(grid) is grid

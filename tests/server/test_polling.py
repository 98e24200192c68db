"""The server receives until enough clients have answered."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from flwr.app import Error, Message, MessageType, RecordDict

from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import EngineError
from fedbn_flwr.transport.polling_grid import PollingGrid
from fedbn_flwr.transport.step_transport import send_until


class Slow(PollingGrid):
    """Answers the message of node k after ``delays[k]`` seconds; an infinite delay is a
    node that is lost.
    """

    inner = None  # type: ignore[assignment]

    def __init__(self, delays: dict[int, float], push: str = "all") -> None:
        self.delays, self.push, self.polls = delays, push, 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.sent = {f"id-{m.metadata.dst_node_id}": m for m in messages}
        self.start = time.monotonic()
        ids = list(self.sent)
        return {"all": ids, "none": [], "not the first": ["", *ids[1:]]}[self.push]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.polls += 1
        replies = []
        for i in message_ids:
            if (
                time.monotonic() - self.start
                >= self.delays[self.sent[i].metadata.dst_node_id]
            ):
                reply = Message(Error(5, "lost"), reply_to=self.sent[i])
                reply.metadata.__dict__.update(_reply_to_message_id=i, _src_node_id=1)
                replies.append(reply)
        return replies


@pytest.fixture(autouse=True)
def identity():
    """Messages are only made where Flower knows the process."""
    with InProcessGrid(None, 1):  # type: ignore[arg-type]
        yield


def asked(grid: Slow) -> list[Message]:
    return [
        Message(RecordDict(), node_id, MessageType.TRAIN) for node_id in grid.delays
    ]


def test_replies_are_returned_by_node_id() -> None:
    grid = Slow({7: 0.0, 8: 0.05})
    replies = send_until(grid, asked(grid), lambda replies, seconds: seconds > 5)
    assert sorted(replies) == [7, 8]
    assert [replies[i].metadata.src_node_id for i in (7, 8)] == [7, 8]
    assert time.monotonic() - grid.start < 1


def test_receiving_stops_as_soon_as_the_replies_are_enough() -> None:
    grid = Slow({7: 0.0, 8: 60.0})
    assert list(
        send_until(grid, asked(grid), lambda replies, seconds: 7 in replies)
    ) == [7]
    assert list(
        send_until(grid, asked(grid), lambda replies, seconds: seconds > 0.2)
    ) == [7]
    assert 0.2 <= time.monotonic() - grid.start < 1
    assert grid.polls < 200


def test_messages_that_could_not_be_pushed_are_left_out_or_an_error() -> None:
    grid = Slow({7: 0.0, 8: 0.0}, "not the first")
    assert list(
        send_until(grid, asked(grid), lambda replies, seconds: seconds > 5)
    ) == [8]
    grid = Slow({7: 0.0, 8: 0.0}, "none")
    with pytest.raises(EngineError, match="only 0 of 2 messages could be sent"):
        send_until(grid, asked(grid), lambda replies, seconds: True)

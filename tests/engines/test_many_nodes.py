"""A node is plain data until it is used: no thread and no context for each of many."""

from __future__ import annotations

import threading

from flwr.app import Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.engines import InProcessGrid


def test_many_nodes_are_numbers_until_they_are_used() -> None:
    app = ClientApp()

    @app.query()
    def answer(message, context):
        return Message(RecordDict(), reply_to=message)

    before = threading.active_count()
    with InProcessGrid(app, 10_000, threads=2) as grid:
        assert threading.active_count() == before
        assert grid._contexts == {}
        chosen = grid.get_node_ids()[::1000]
        replies = grid.send_and_receive([Message(RecordDict(), node_id, MessageType.QUERY) for node_id in chosen])
        assert [reply.metadata.src_node_id for reply in replies] == chosen
        assert threading.active_count() <= before + 2
        assert grid._contexts == {}, "these nodes keep nothing"
        assert grid._queues == {}, "nothing is left of a node that has done its work"


def test_a_node_works_on_one_message_at_a_time_and_in_order() -> None:
    """Also where there are more workers than nodes."""
    app, at_work, seen = ClientApp(), threading.Semaphore(1), []

    @app.query()
    def answer(message, context):
        assert at_work.acquire(blocking=False), "two messages at once"
        seen.append(message.metadata.message_id)
        at_work.release()
        return Message(RecordDict(), reply_to=message)

    with InProcessGrid(app, 1, threads=8) as grid:
        node_id = grid.get_node_ids()[0]
        message_ids = grid.push_messages([Message(RecordDict(), node_id, MessageType.QUERY) for _ in range(50)])
        while len(seen) < 50:
            pass
        assert seen == message_ids
        assert not any(reply.has_error() for reply in grid.pull_messages(message_ids))

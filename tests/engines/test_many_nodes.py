"""A node is plain data before its first use, without thread or context."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque

import pytest

from fedbn_flwr.engines import InProcessGrid, client_work, in_process
from tests.support.in_process import answer, app_of, to


def test_many_nodes_are_numbers_until_they_are_used() -> None:
    before = threading.active_count()
    with InProcessGrid(app_of(answer), 10_000, threads=2) as grid:
        assert threading.active_count() == before
        assert grid._contexts == {}
        replies = grid.send_and_receive(to(grid, *range(0, 10_000, 1000)))
        chosen = grid.get_node_ids()[::1000]
        assert [reply.metadata.src_node_id for reply in replies] == chosen
        assert threading.active_count() <= before + 2
        assert grid._contexts == {}, "these nodes keep nothing"
        assert grid._queues == {}, "nothing is left of a node that has done its work"


class Overtaken(deque):
    """A queue whose reader is overtaken by another thread when it is empty."""

    def __len__(self) -> int:
        count = super().__len__()
        if not count:
            time.sleep(0.002)
        return count


@pytest.mark.parametrize(("nodes", "threads"), [(1, 3), (40, 1), (40, 3), (40, 12)])
def test_every_message_is_answered_whoever_overtakes_whom(
    nodes: int, threads: int, monkeypatch
) -> None:
    for module in (client_work, in_process):
        monkeypatch.setattr(module, "deque", Overtaken)
    with InProcessGrid(app_of(answer), nodes, threads=threads) as grid:
        partitions = itertools.cycle(range(nodes))
        for number in range(60):
            waiting = set()
            # The second message comes while the threads end their work on the first.
            for count in (threads, 1):
                batch = to(grid, *itertools.islice(partitions, count))
                waiting.update(grid.push_messages(batch))
                time.sleep(0.0002 * (number % 20))
            # No further message is sent, because it would also deliver a forgotten
            # message.
            latest = time.monotonic() + 20
            while waiting:
                assert time.monotonic() < latest, "a message is not answered"
                for reply in grid.pull_messages([*waiting]):
                    waiting.remove(reply.metadata.reply_to_message_id)
                time.sleep(0.0005)

"""Sending and receiving at once: a Grid that waits on milliseconds and knows which node every reply came from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from logging import WARNING
from typing import Any

import httpx
from flwr.app import Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid, InMemoryGrid

from fedbn_flwr.errors import EngineError

__all__ = ["PollingGrid", "in_simulation", "over_network", "prompt", "pull", "push"]

# Seconds between polls, from the first to those of a long wait: each takes the SuperLink's database for a moment.
_FIRST_WAIT, _LONGEST_WAIT = 0.002, 0.25
_TRIES = 8  # of a request that fails in the SuperLink


def prompt(grid: Grid) -> Grid:
    """Return a grid that answers as soon as a reply is there: ``grid`` itself where it says so."""
    return grid if getattr(grid, "answers_promptly", False) else PollingGrid(grid)


def in_simulation(grid: Grid) -> bool:
    """Tell whether the grid is that of Flower's simulation."""
    return isinstance(grid._grid if isinstance(grid, PollingGrid) else grid, InMemoryGrid)


def over_network(grid: Grid) -> bool:
    """Tell whether the grid's nodes are processes of their own, which come and go."""
    return isinstance(grid._grid if isinstance(grid, PollingGrid) else grid, HttpGrid)


class PollingGrid(Grid):
    """Any Grid, polled promptly.

    Flower's own ``send_and_receive`` naps between polls (0.1 s in simulation, 3 s over a network) and an error reply
    for a lost node does not carry that node's id. This one polls after 2 ms, then ever later up to 0.25 s, and maps
    replies by ``reply_to_message_id``.
    """

    answers_promptly = True

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        _retry_500(grid)

    def set_run(self, run) -> None:  # type: ignore[no-untyped-def]
        """See ``Grid.set_run``."""
        self._grid.set_run(run)

    @property
    def run(self):  # type: ignore[no-untyped-def]
        """See ``Grid.run``."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """See ``Grid.create_message``."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """See ``Grid.get_node_ids``."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See ``Grid.push_messages``."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See ``Grid.pull_messages``."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send all messages and return the replies that came within ``timeout`` seconds, in any order.

        Nodes that did not answer in time are named in the log; the reply of a lost node (an error) carries the id of
        that node.

        Raises:
            EngineError: the messages could not be pushed.
        """
        waiting = push(self, list(messages))
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        pause = _FIRST_WAIT
        while waiting:
            arrived = pull(self, waiting)
            replies += arrived
            if not waiting:
                break
            left = _LONGEST_WAIT if deadline is None else deadline - time.monotonic()
            if left <= 0:
                nodes = ", ".join(str(node_id) for node_id in waiting.values())
                log(WARNING, "No reply within %s s from node(s) %s; going on without.", timeout, nodes)
                break
            pause = _FIRST_WAIT if arrived else min(pause * 1.5, _LONGEST_WAIT)
            time.sleep(min(pause, left))
        return replies


def push(grid: Grid, messages: Sequence[Message]) -> dict[str, int]:
    """Push the messages; return message id -> node id of those that went out.

    Raises:
        EngineError: the messages could not be pushed.
    """
    node_ids = [message.metadata.dst_node_id for message in messages]
    message_ids = list(grid.push_messages(messages))
    if len(message_ids) != len(messages):  # Flower's answer to a payload it refuses as a whole
        raise EngineError(
            f"only {len(message_ids)} of {len(messages)} messages could be pushed (too large? the log says why)"
        )
    if lost := [str(node_id) for i, node_id in zip(message_ids, node_ids, strict=True) if not i]:
        log(WARNING, "Messages to node(s) %s could not be pushed; going on without.", ", ".join(lost))
    return {i: node_id for i, node_id in zip(message_ids, node_ids, strict=True) if i}


def pull(grid: Grid, waiting: dict[str, int]) -> list[Message]:
    """Return the replies that are there, and take the messages they answer out of ``waiting``.

    The error reply for a lost node does not carry that node's id: every reply is given that of the node asked.
    """
    replies = []
    for reply in grid.pull_messages(list(waiting)):
        node_id = waiting.pop(reply.metadata.reply_to_message_id, None)
        if node_id is not None:
            reply.metadata.__dict__["_src_node_id"] = node_id
            replies.append(reply)
    return replies


def _retry_500(grid: Grid) -> None:
    """Let each request of Flower's grid over HTTP be tried again after a 500, as it is after 502 to 504.

    A SuperLink whose SQLite database is locked by what nodes write answers 500. The whole of ``pull_messages`` cannot
    be tried again: what it had pulled would be lost.
    """
    invoker = getattr(grid, "_retry_invoker", None)
    if invoker is None or isinstance(invoker.should_giveup, _Patience):
        return
    invoker.should_giveup = patience = _Patience(invoker.should_giveup)
    succeeded = invoker.on_success

    def on_success(state: Any) -> None:
        patience.begin()
        if succeeded is not None:
            succeeded(state)

    invoker.on_success = on_success


class _Patience:
    """Whether to give a request up: as Flower says, and a 500 once it came time after time.

    Flower's own threads send requests through the same grid: each thread, and so each request, has its own count.
    """

    def __init__(self, otherwise: Callable[[Exception], bool]) -> None:
        self._otherwise = otherwise
        self._here = threading.local()

    def begin(self) -> None:
        """The thread's next request is another."""
        self._here.failures = 0

    def __call__(self, error: Exception) -> bool:
        failed = isinstance(error, httpx.HTTPStatusError) and (
            error.response.status_code == httpx.codes.INTERNAL_SERVER_ERROR
        )
        failures = self._here.failures = getattr(self._here, "failures", 0) + failed
        give_up = failures >= _TRIES if failed else self._otherwise(error)
        if give_up:
            self.begin()
        elif failed:
            log(WARNING, "The SuperLink failed (500; its database may be locked); trying again.")
        return give_up

"""A Grid without Flower's pauses that knows the sender of every reply."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.compat.flower import (
    QUERY_FUNCTION,
    Run,
    has_function,
    is_network_grid,
    is_simulation_grid,
    loaded_apps,
    retry_http_500,
    set_reply_source,
)
from fedbn_flwr.errors import EngineError, one_line
from fedbn_flwr.messages.packing import packed_for, unpacked_reply
from fedbn_flwr.messages.protocol import NodeProperties

logger = logging.getLogger("flwr")

# Seconds until the log names the nodes without a reply for the first time, and seconds
# between two later times.
_FIRST_NOTICE, _NEXT_NOTICES = 60.0, 300.0


class Pauses(NamedTuple):
    """Pauses between polls.

    Attributes:
        share: length of a pause as a share of the time since the last reply.
        shortest: smallest length in seconds.
        longest: largest length in seconds.
        since_sent: whether the share applies to the time since the messages were sent.
    """

    share: float
    shortest: float
    longest: float
    since_sent: bool = False


_PAUSES = Pauses(0.5, 0.002, 0.25)
# Over a network, a poll is a request and a write to the SuperLink's database, and a
# reply takes seconds.
_PAUSES_OVER_NETWORK = Pauses(1 / 16, 0.1, 5.0, since_sent=True)
_LOADING = 20.0  # most seconds until a simulation has loaded its app


class ImmediateGrid(Grid):
    """A grid whose ``send_and_receive`` returns as soon as the last reply arrives.

    Attributes:
        nodes_may_join: whether later calls of ``get_node_ids`` may return more nodes.
    """

    nodes_may_join = True

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """See ``Grid.create_message``."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def send_and_receive_until(
        self,
        messages: Iterable[Message],
        enough: Callable[[Sequence[Message]], bool],
        *,
        timeout: float,
    ) -> Iterable[Message]:
        """Send all messages, and return the replies when ``enough(replies)`` is true.

        The timeout also ends the wait. A grid that runs the clients itself returns all
        replies.
        """
        return self.send_and_receive(messages, timeout=timeout)

    def receive(
        self, messages: Iterable[Message], *, timeout: float | None
    ) -> Sequence[Message]:
        """Send all messages, and return the replies within ``timeout`` seconds.

        If the clients work in other processes, a grid may return immediately. Reading a
        reply from its sequence then waits for the reply.
        """
        return list(self.send_and_receive(messages, timeout=timeout))

    def node_properties(
        self, config: Mapping[str, Any], node_ids: Sequence[int]
    ) -> Mapping[int, NodeProperties]:
        """Return nodes' known answers to the strategies' query.

        Other nodes must be asked by a message.
        """
        return {}

    def answers_queries(self) -> bool | None:
        """Return whether the nodes' app answers queries, or None if this is unknown."""
        return None

    def pause(self, seconds: float) -> None:
        """Wait before the next poll. A grid may end the wait when a reply arrives."""
        time.sleep(seconds)


def polling(grid: Grid) -> ImmediateGrid:
    """Return ``grid`` if it is an ``ImmediateGrid``, otherwise a wrapper around it."""
    return grid if isinstance(grid, ImmediateGrid) else PollingGrid(grid)


def in_simulation(grid: Grid) -> bool:
    """Return whether the grid belongs to Flower's simulation."""
    return is_simulation_grid(grid.inner if isinstance(grid, PollingGrid) else grid)


def over_network(grid: Grid) -> bool:
    """Return whether the grid's nodes are separate processes that may come and go."""
    return is_network_grid(grid.inner if isinstance(grid, PollingGrid) else grid)


class PollingGrid(ImmediateGrid):
    """Any Grid, polled quickly.

    Flower's own ``send_and_receive`` sleeps between polls, 0.1 s in simulation and 3 s
    over a network. Its error reply for a lost node does not have the id of the node.
    This grid finds the sender by ``reply_to_message_id``. In simulation, it polls after
    2 ms, then with longer pauses up to 0.25 s. Over a network, a pause is a sixteenth
    of the time since the messages were sent, within 0.1 to 5 s.

    Messages to the nodes of ``pack_for``, and their replies, are sent with their arrays
    in one piece. If the arrays of a reply do not fit their manifest, it becomes an
    error reply of its node.

    Args:
        grid: the polled grid.
        packs: whether arrays are sent in one piece. By default, this is true over a
            network, because there each array has a cost.

    Attributes:
        inner: the polled grid.
    """

    def __init__(self, grid: Grid, packs: bool | None = None) -> None:
        self.inner = grid
        self._names: dict[int, object] = {}
        self._packs = is_network_grid(grid) if packs is None else packs
        self._packing: set[int] = set()
        retry_http_500(grid)

    def set_run(self, run: Run) -> None:
        """See ``Grid.set_run``."""
        self.inner.set_run(run)

    @property
    def run(self) -> Run:
        """See ``Grid.run``."""
        return self.inner.run

    def name_nodes(self, names: Mapping[int, object]) -> None:
        """Set the objects whose texts name the nodes in the log, by node id."""
        self._names |= names

    def pack_for(self, node_ids: Iterable[int]) -> None:
        """Send arrays to these nodes in one piece, because their app can read this."""
        if self._packs:
            self._packing.update(node_ids)

    def get_node_ids(self) -> Iterable[int]:
        """See ``Grid.get_node_ids``."""
        return self.inner.get_node_ids()

    def answers_queries(self) -> bool | None:
        """See ``ImmediateGrid.answers_queries``."""
        apps = loaded_apps(_LOADING) if in_simulation(self) else []
        if apps and not any(has_function(app, QUERY_FUNCTION) for app in apps):
            return False
        return None

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See ``Grid.push_messages``."""
        if self._packing:
            messages = list(packed_for(messages, self._packing))
        return self.inner.push_messages(messages)

    def pull_messages(
        self,
        message_ids: Iterable[str] | None = None,
        *,
        reply_to_message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        """See ``Grid.pull_messages``."""
        # Pass the ids by position, because the argument has a new name since Flower
        # 1.43, ``reply_to_message_ids``.
        wanted = message_ids if reply_to_message_ids is None else reply_to_message_ids
        if wanted is None:
            pulled = self.inner.pull_messages()  # type: ignore[call-arg]
        else:
            pulled = self.inner.pull_messages(wanted)
        return [unpacked_reply(reply) for reply in pulled]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send all messages, and return the replies within ``timeout`` seconds.

        The replies are unordered. The log names nodes that do not answer in time. Over
        a network, it also names the awaited nodes from time to time during the wait,
        because a connected node whose apps are not started never answers. The error
        reply for a lost node has the id of that node.

        Raises:
            EngineError: the messages could not be pushed.
        """
        return self.send_and_receive_until(messages, lambda _: False, timeout=timeout)

    def send_and_receive_until(
        self,
        messages: Iterable[Message],
        enough: Callable[[Sequence[Message]], bool],
        *,
        timeout: float | None,
    ) -> list[Message]:
        """Send all messages, and return the replies once there are enough.

        Return as soon as ``enough(replies)`` is true or all replies have arrived. The
        timeout also ends the wait, and the log names the nodes without a reply. None
        means no timeout.
        """
        # In simulation, nodes are always available, so the log need not name them.
        pauses, notice = _PAUSES, math.inf
        if over_network(self):
            pauses, notice = _PAUSES_OVER_NETWORK, _FIRST_NOTICE
        limit = math.inf if timeout is None else timeout

        replies = []
        for arrived, waiting, seconds in polls(self, list(messages), pauses, limit):
            replies += arrived
            # End if there are enough replies or the time is up.
            if not waiting or enough(replies):
                break
            if seconds >= limit:
                logger.warning(
                    "No reply within %s s from %s; continuing without them.",
                    timeout,
                    self._listed(waiting.values()),
                )
                break

            # During a long wait, name the awaited nodes, but not too often.
            if seconds >= notice:
                notice = seconds + _NEXT_NOTICES
                logger.info(
                    "%.0f s: still waiting for %s. A node may be at work. Or it is"
                    " online, but its superexec-clientapp, which starts its apps, is"
                    " not running.",
                    seconds,
                    self._listed(waiting.values()),
                )
        return replies

    def _listed(self, node_ids: Iterable[int]) -> str:
        return ", ".join(
            str(self._names.get(node_id, f"node {node_id}")) for node_id in node_ids
        )


def polls(
    grid: Grid, messages: Sequence[Message], pauses: Pauses, timeout: float = math.inf
) -> Iterator[tuple[list[Message], Mapping[str, int], float]]:
    """Send all messages, and poll until each has a reply.

    The caller may stop earlier, and must stop at its own timeout.

    Args:
        grid: the grid. Its own ``send_and_receive`` would pause and log.
        messages: the messages, possibly none.
        pauses: the pauses between two polls.
        timeout: seconds after which there is a poll without a pause.

    Yields:
        For each poll: the replies that have arrived; the node ids of messages without a
        reply, by message id; and the seconds from the push to this poll.

    Raises:
        EngineError: the messages could not be pushed.
    """
    sleep = grid.pause if isinstance(grid, ImmediateGrid) else time.sleep
    waiting = _push(grid, messages)
    begun = latest = time.monotonic()
    pause = pauses.shortest
    while waiting:
        sleep(max(min(pause, begun + timeout - time.monotonic()), 0))
        # Take the time before the pull, because the pull is not part of the wait.
        now = time.monotonic()
        arrived = _pull(grid, waiting)
        if arrived:
            latest = now
        yield arrived, waiting, now - begun
        # Make the pause longer with time, because a longer pause then causes little
        # extra delay.
        since = begun if pauses.since_sent else latest
        pause = max(pauses.share * (now - since), pauses.shortest)
        pause = min(pause, pauses.longest)


def _push(grid: Grid, messages: Sequence[Message]) -> dict[str, int]:
    """Push the messages and return the node ids of accepted messages, by message id.

    Raises:
        EngineError: the messages could not be pushed.
    """
    node_ids = [message.metadata.dst_node_id for message in messages]
    message_ids = list(grid.push_messages(messages))
    # If Flower refuses all messages, it returns fewer ids than messages. If it refuses
    # one message, the id of this message is empty.
    if len(message_ids) != len(messages):
        raise EngineError(
            f"only {len(message_ids)} of {len(messages)} messages could be sent."
            " Flower's log gives the reason. A message may be too large."
        )
    waiting = {}
    lost = []
    for message_id, node_id in zip(message_ids, node_ids, strict=True):
        if message_id:
            waiting[message_id] = node_id
        else:
            lost.append(str(node_id))
    if lost:
        logger.warning(
            "Messages to node(s) %s could not be pushed; continuing without them.",
            ", ".join(lost),
        )
    return waiting


def _pull(grid: Grid, waiting: dict[str, int]) -> list[Message]:
    """Return arrived replies, and remove their messages from ``waiting``.

    Each reply gets the id of the asked node, because Flower's error reply for a lost
    node does not have it.
    """
    replies = []
    for reply in grid.pull_messages(list(waiting)):
        node_id = waiting.pop(reply.metadata.reply_to_message_id, None)
        # The unknown reply may be a second reply to one message.
        if node_id is None:
            what = "no error"
            if reply.has_error():
                reason = one_line(str(reply.error.reason))
                what = f"error {reply.error.code}: {reason}"
            logger.warning(
                "A reply that answers none of the awaited messages is ignored (%s).",
                what,
            )
            continue
        set_reply_source(reply, node_id)
        replies.append(reply)
    return replies

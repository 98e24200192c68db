"""A Grid without Flower's pauses, which knows the sender of every reply."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from flwr.app import Context, Message, RecordDict
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
from fedbn_flwr.errors import EngineError
from fedbn_flwr.messages.packing import packed_for, unpacked_reply
from fedbn_flwr.messages.protocol import NodeProperties

__all__ = [
    "ImmediateGrid",
    "Pauses",
    "PollingGrid",
    "TellsProperties",
    "in_simulation",
    "over_network",
    "polling",
    "polls",
]

logger = logging.getLogger("flwr")

# Seconds after which the log names the nodes without a reply, and then between two such
# lines.
_FIRST_NOTICE, _NEXT_NOTICES = 60.0, 300.0


class Pauses(NamedTuple):
    """Pauses between polls.

    Attributes:
        share: a pause as a share of the time since the last reply.
        shortest: its least seconds.
        longest: its most seconds.
        whole: whether it is a share of the time since the messages were sent.
        first: seconds of the pause before the first poll.
    """

    share: float
    shortest: float
    longest: float
    whole: bool = False
    first: float = 0.0


_PAUSES = Pauses(0.5, 0.002, 0.25)
# Over a network a poll is a request and a write to the SuperLink's database, and a
# reply takes seconds.
_PAUSES_OVER_NETWORK = Pauses(1 / 16, 0.1, 5.0, whole=True, first=0.1)
_LOADING = 20.0  # seconds at most until a simulation has loaded its app
# of the seconds of the quickest reply so far to messages of the same type
_FIRST_POLL = 0.75


@runtime_checkable
class TellsProperties(Protocol):
    """An app that can tell a node's properties without a message."""

    def node_properties(
        self, config: Mapping[str, Any], context: Context
    ) -> NodeProperties:
        """Return what the node would answer to the strategies' query.

        Raises:
            Exception: only the answer to a message can tell.
        """


class ImmediateGrid(Grid):
    """A grid whose ``send_and_receive`` returns as soon as the last reply arrives."""

    def send_and_receive_until(
        self,
        messages: Iterable[Message],
        enough: Callable[[Sequence[Message]], bool],
        *,
        timeout: float,
    ) -> Iterable[Message]:
        """Send all messages; return the replies when ``enough(replies)`` is true.

        The timeout ends the wait, too. A grid that runs the clients itself returns all
        replies.
        """
        return self.send_and_receive(messages, timeout=timeout)

    def receive(
        self, messages: Iterable[Message], *, timeout: float | None
    ) -> Sequence[Message]:
        """Send all messages; return the replies that arrive within ``timeout`` seconds.

        A grid whose clients work beside this process returns at once, and its sequence
        waits for each reply that it is asked for.
        """
        return list(self.send_and_receive(messages, timeout=timeout))

    def node_properties(
        self, config: Mapping[str, Any], node_ids: Sequence[int]
    ) -> Mapping[int, NodeProperties]:
        """Return what nodes would answer to the strategies' query, without messages.

        Nodes that are not in the result must be asked.
        """
        return {}

    def answers_queries(self) -> bool | None:
        """Return whether the nodes' app has a function for queries; None = not known."""
        return None

    def name_nodes(self, names: Mapping[int, object]) -> None:
        """Call the nodes in the log by the text of these objects, by node id."""

    def pack_for(self, node_ids: Iterable[int]) -> None:
        """Note that the apps of these nodes read arrays in one piece.

        See ``messages.packing``. A grid that sends arrays without a cost for each one
        ignores it.
        """


def polling(grid: Grid) -> ImmediateGrid:
    """Return ``grid`` if it is an ``ImmediateGrid``, else one around it."""
    return grid if isinstance(grid, ImmediateGrid) else PollingGrid(grid)


def in_simulation(grid: Grid) -> bool:
    """Return whether the grid belongs to Flower's simulation."""
    return is_simulation_grid(grid.inner if isinstance(grid, PollingGrid) else grid)


def over_network(grid: Grid) -> bool:
    """Return whether the grid's nodes are separate processes, which may come and go."""
    return is_network_grid(grid.inner if isinstance(grid, PollingGrid) else grid)


class PollingGrid(ImmediateGrid):
    """Any Grid, polled quickly.

    Flower's own ``send_and_receive`` sleeps between polls (0.1 s in simulation, 3 s
    over a network), and an error reply for a lost node does not have that node's id.
    This grid finds the sender by ``reply_to_message_id``. In simulation it polls after
    2 ms, then with longer pauses up to 0.25 s. Over a network a pause is a sixteenth of
    the time since the messages were sent, 0.1 to 5 s, and the first poll comes after
    three quarters of the time of the quickest reply to such messages so far.

    Messages to the nodes of ``pack_for``, and their replies, travel with their arrays
    in one piece. A reply whose arrays do not fit their manifest becomes an error reply
    of its node.

    Args:
        grid: the grid that is polled.
        packs: whether arrays travel in one piece; default: over a network, where each
            array has a cost of its own.

    Attributes:
        inner: the grid that is polled.
    """

    def __init__(self, grid: Grid, packs: bool | None = None) -> None:
        self.inner = grid
        self._names: dict[int, object] = {}
        self._packs = is_network_grid(grid) if packs is None else packs
        self._packing: set[int] = set()
        # for each type of message, seconds until a reply that is no error
        self._quickest: dict[str, float] = {}
        retry_http_500(grid)

    def set_run(self, run: Run) -> None:
        """See ``Grid.set_run``."""
        self.inner.set_run(run)

    @property
    def run(self) -> Run:
        """See ``Grid.run``."""
        return self.inner.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """See ``Grid.create_message``."""
        return self.inner.create_message(
            content, message_type, dst_node_id, group_id, ttl
        )

    def name_nodes(self, names: Mapping[int, object]) -> None:
        """See ``ImmediateGrid.name_nodes``."""
        self._names |= names

    def pack_for(self, node_ids: Iterable[int]) -> None:
        """See ``ImmediateGrid.pack_for``."""
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
        # Flower calls the argument ``reply_to_message_ids`` from 1.43 on. By place it
        # is the same in both.
        wanted = message_ids if reply_to_message_ids is None else reply_to_message_ids
        if wanted is None:
            pulled = self.inner.pull_messages()  # type: ignore[call-arg]
        else:
            pulled = self.inner.pull_messages(wanted)
        return [unpacked_reply(reply) for reply in pulled]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send all messages; return the replies within ``timeout`` seconds, unordered.

        The log names nodes that do not answer in time, over a network now and then
        before that, too: a node answers nothing while its connection is up and its apps
        are not started. The error reply for a lost node has the id of that node.

        Raises:
            EngineError: the messages could not be pushed.
        """
        return self._collected(messages, timeout)

    def send_and_receive_until(
        self,
        messages: Iterable[Message],
        enough: Callable[[Sequence[Message]], bool],
        *,
        timeout: float,
    ) -> Iterable[Message]:
        """Send all messages; return the replies when ``enough(replies)`` is true.

        The timeout ends the wait, too; then the log names the nodes without a reply.
        """
        return self._collected(messages, timeout, enough)

    def _collected(
        self,
        messages: Iterable[Message],
        timeout: float | None,
        enough: Callable[[Sequence[Message]], bool] = lambda replies: False,
    ) -> list[Message]:
        """Return the replies to the messages that arrive in time."""
        network = over_network(self)
        messages = list(messages)
        # In simulation nodes are always there, and nobody has to be told.
        pauses, notice = _PAUSES, math.inf
        if network:
            pauses, notice = self._pauses(messages), _FIRST_NOTICE
        limit = math.inf if timeout is None else timeout

        replies = []
        for arrived, waiting, seconds in polls(self, messages, pauses, limit):
            replies += arrived
            # An error comes at once, and tells nothing of how long the work takes.
            for reply in arrived:
                if network and reply.has_content():
                    kind = reply.metadata.message_type
                    quickest = self._quickest.get(kind, seconds)
                    self._quickest[kind] = min(seconds, quickest)

            # End, by the answers or by the clock.
            if not waiting or enough(replies):
                break
            if seconds >= limit:
                logger.warning(
                    "No reply within %s s from %s; continuing without them.",
                    timeout,
                    self._listed(waiting.values()),
                )
                break

            # A long wait names those that are waited for, and not too often.
            if seconds >= notice:
                notice = seconds + _NEXT_NOTICES
                logger.info(
                    "%.0f s: still waiting for %s. A node may be at work; or it is"
                    " online and its superexec-clientapp, which starts its apps, is not"
                    " running.",
                    seconds,
                    self._listed(waiting.values()),
                )
        return replies

    def _pauses(self, messages: Sequence[Message]) -> Pauses:
        """Return the pauses over a network of a wait for replies to these messages."""
        kinds = {message.metadata.message_type for message in messages}
        # 0: a kind without a reply so far may be quicker than all others
        quickest = min((self._quickest.get(kind, 0.0) for kind in kinds), default=0.0)
        first = max(_PAUSES_OVER_NETWORK.first, _FIRST_POLL * quickest)
        return _PAUSES_OVER_NETWORK._replace(first=first)

    def _listed(self, node_ids: Iterable[int]) -> str:
        return ", ".join(
            str(self._names.get(node_id, f"node {node_id}")) for node_id in node_ids
        )


def polls(
    grid: Grid, messages: Sequence[Message], pauses: Pauses, timeout: float = math.inf
) -> Iterator[tuple[list[Message], Mapping[str, int], float]]:
    """Send all messages, and poll until each has a reply.

    The caller may stop earlier, and does so at its timeout.

    Args:
        grid: sends and receives; Flower's own method would pause, and log.
        messages: may be none.
        pauses: the pauses between two polls.
        timeout: seconds after which there is a poll without such a pause.

    Yields:
        For each poll: the replies that have arrived, message id -> node id of those
        without a reply, and the seconds from the push to this poll.

    Raises:
        EngineError: the messages could not be pushed.
    """
    waiting = _push(grid, messages)
    begun = latest = time.monotonic()
    pause = pauses.first
    while waiting:
        time.sleep(max(min(pause, begun + timeout - time.monotonic()), 0))
        # before the pull, whose own seconds are none of the wait
        now = time.monotonic()
        arrived = _pull(grid, waiting)
        if arrived:
            latest = now
        yield arrived, waiting, now - begun
        # The longer nothing comes, the less a longer pause delays.
        since = begun if pauses.whole else latest
        pause = max(pauses.share * (now - since), pauses.shortest)
        pause = min(pause, pauses.longest)


def _push(grid: Grid, messages: Sequence[Message]) -> dict[str, int]:
    """Push the messages; return message id -> node id of those that were accepted.

    Raises:
        EngineError: the messages could not be pushed.
    """
    node_ids = [message.metadata.dst_node_id for message in messages]
    message_ids = list(grid.push_messages(messages))
    # Flower refuses all messages by a shorter list, and one by an empty id.
    if len(message_ids) != len(messages):
        raise EngineError(
            f"only {len(message_ids)} of {len(messages)} messages could be sent;"
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
    """Return the replies that have arrived; remove their messages from ``waiting``.

    Each reply gets the id of the node that was asked: Flower's error reply for a lost
    node does not have it.
    """
    replies = []
    for reply in grid.pull_messages(list(waiting)):
        node_id = waiting.pop(reply.metadata.reply_to_message_id, None)
        # for example a second reply to one message
        if node_id is None:
            what = "no error"
            if reply.has_error():
                what = f"error {reply.error.code}: {reply.error.reason}"
            logger.warning(
                "A reply to none of the messages that are waited for is left out (%s).",
                what,
            )
            continue
        set_reply_source(reply, node_id)
        replies.append(reply)
    return replies

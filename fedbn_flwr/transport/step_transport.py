"""The parts that all transports of a synchronised step share.

These are settings, limits, the result, and the sending of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.messages.records import Traffic, of_kind
from fedbn_flwr.transport.barrier import Member
from fedbn_flwr.transport.polling_grid import Pauses, over_network, polls
from fedbn_flwr.transport.through_user_code import Reducer

Enough = Callable[[Mapping[int, Message], float], bool]
"""A function ``enough(replies, seconds)`` that returns whether to stop waiting.

It gets the replies by node id and the seconds so far.
"""

_PAUSES = Pauses(0.02, 0.001, 0.1)  # a step has many exchanges of a few milliseconds
# Do not pause long, because the other clients learn of a failed client only at a poll.
_PAUSES_OVER_NETWORK = Pauses(1 / 16, 0.1, 1.0, since_sent=True)


@dataclass(frozen=True)
class LinkSettings:
    """Settings for exchanges of a synchronised step between processes.

    In one process, clients wait at a barrier instead.

    Attributes:
        transport: a name in ``TRANSPORTS``.
        timeout: seconds that an exchange waits for its last client.
        bind: address of the server's port, host:port, if the transport has a port.
        address: address for clients. If empty, it is ``bind`` with the port in use.
        tls_dir: folder of the port's certificates. If empty, only loopback is allowed.
    """

    transport: str = "messages"
    timeout: float = 120.0
    bind: str = "127.0.0.1:0"
    address: str = ""
    tls_dir: str = ""


@dataclass(frozen=True)
class Limits:
    """The limits of a synchronised step.

    Attributes:
        exchange_timeout: seconds that an exchange waits for its last client after its
            first. In one process, the exchange waits as long for each further client.
        reply_timeout: seconds to wait for the models.
        min_members: smallest number of clients. With fewer, the step is given up.
    """

    exchange_timeout: float
    reply_timeout: float
    min_members: int


@dataclass(frozen=True)
class StepResult:
    """The result of a synchronised step.

    Attributes:
        replies: the clients' replies, with their models or errors.
        traffic: traffic of the exchanges, without the models.
        members: ids of the nodes whose batches are in the finished step; empty if it
            was not finished. If a node is lost after the step, its batch stays in it.
        dropped: the reason for dropping each dropped client, by node id. If the client
            is not a member, the step was repeated without it. A member that failed on
            its own after its last exchange is not included.
    """

    replies: list[Message]
    traffic: Traffic
    members: Collection[int]
    dropped: Mapping[int, str]


class Transport:
    """A way to transport the exchanges between processes.

    An object is the server's half, and exists once in a run. ``reducer`` returns the
    client's half.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings

    def step(
        self,
        grid: Grid,
        messages: Sequence[Message],
        members: Mapping[int, Member],
        limits: Limits,
    ) -> StepResult:
        """Send the training messages, answer the exchanges, and return the replies.

        Args:
            grid: the nodes.
            messages: a training message for each member.
            members: the clients by node id, in the order of sums.
            limits: the limits of the step.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the resources that stay open between the rounds of a run."""

    @staticmethod
    def reducer(config: Mapping[str, Any]) -> Reducer | None:
        """Return the client's half, given the config of the training message.

        Return None if the exchanges of this message use another transport.
        """
        return None


def send_until(
    grid: Grid, messages: Sequence[Message], enough: Enough
) -> dict[int, Message]:
    """Send all messages, and return the replies by node id when there are enough.

    The wait ends when all replies have arrived or ``enough`` returns True. Because
    ``enough`` also gets the time, the caller decides when to give up a client, and logs
    it. In contrast, ``ImmediateGrid.send_and_receive_until`` has one timeout and logs
    the silent nodes itself.

    Raises:
        EngineError: the messages could not be pushed.
    """
    replies: dict[int, Message] = {}
    pauses = _PAUSES_OVER_NETWORK if over_network(grid) else _PAUSES
    for arrived, waiting, seconds in polls(grid, messages, pauses):
        replies |= {reply.metadata.src_node_id: reply for reply in arrived}
        if waiting and enough(replies, seconds):
            break
    return replies


def with_config(message: Message, config: Mapping[str, Any]) -> Message:
    """Return a copy of the message with additional entries in its config."""
    content = RecordDict(dict(message.content))
    for key, record in of_kind(message.content, ConfigRecord).items():
        content[key] = ConfigRecord({**record, **config})
    return Message(content, message.metadata.dst_node_id, message.metadata.message_type)

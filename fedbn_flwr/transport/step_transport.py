"""What all transports of a synchronised step share: settings, limits, the result, and
how messages are sent and awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.batchnorm.sync import Combine, combine
from fedbn_flwr.messages.records import Traffic, of_kind
from fedbn_flwr.transport.barrier import Member
from fedbn_flwr.transport.polling_grid import Pauses, over_network, polls
from fedbn_flwr.transport.through_user_code import Reducer

__all__ = [
    "Enough",
    "Limits",
    "LinkSettings",
    "StepResult",
    "Transport",
    "send_until",
    "with_config",
]

Enough = Callable[[Mapping[int, Message], float], bool]
"""``enough(replies, seconds)``: whether to stop, given the replies by node id and the
seconds waited so far.
"""

_PAUSES = Pauses(0.02, 0.001, 0.1)  # a step has many exchanges of a few milliseconds
# At a poll the others are told of a client that has failed, so it is not put off.
_PAUSES_OVER_NETWORK = Pauses(1 / 16, 0.1, 1.0, whole=True, first=0.1)


@dataclass(frozen=True)
class LinkSettings:
    """How the exchanges of a synchronised step travel between processes; in one process
    clients wait at a barrier.

    Attributes:
        transport: a name in ``TRANSPORTS``.
        timeout: seconds that an exchange waits for its last client.
        bind: address of the server's port, host:port, where the transport has one.
        address: address that clients connect to; "" = ``bind`` with the port in use.
        tls_dir: folder of the port's certificates; "" = loopback only.
    """

    transport: str = "messages"
    timeout: float = 120.0
    bind: str = "127.0.0.1:0"
    address: str = ""
    tls_dir: str = ""


@dataclass(frozen=True)
class Limits:
    """When a synchronised step is given up, and the arithmetic of its exchanges.

    Attributes:
        exchange_timeout: seconds that an exchange waits for its last client after its
            first; in one process for the next one.
        reply_timeout: seconds to wait for the models.
        min_members: smallest number of clients.
        answer: the answer to the clients' tensors of an exchange.
    """

    exchange_timeout: float
    reply_timeout: float
    min_members: int
    answer: Combine = combine


@dataclass(frozen=True)
class StepResult:
    """The result of a synchronised step.

    Attributes:
        replies: the clients' replies, with their models or errors.
        traffic: traffic of the exchanges, without the models.
        members: ids of the nodes whose batches are in the finished step; empty if it
            was not finished. A node may be lost after the step, in which its batch
            stays.
        dropped: node id to the reason why the client was dropped. The step was repeated
            without it if it is no member. A member that failed by itself after its last
            exchange is not named.
    """

    replies: list[Message]
    traffic: Traffic
    members: Collection[int]
    dropped: Mapping[int, str]


class Transport:
    """A way of the exchanges between processes: the server's half, made once in a run,
    and the client's.

    Attributes:
        all_at_once: whether all clients of a round must run at the same time, each in a
            process of its own.
        has_port: whether clients connect to a port of the server's: the settings
            ``bind``, ``address`` and ``tls_dir``.
    """

    all_at_once: ClassVar[bool] = False
    has_port: ClassVar[bool] = False

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
            limits: when the step is given up.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close what is open between the rounds of a run."""

    @staticmethod
    def reducer(config: Mapping[str, Any]) -> Reducer | None:
        """Return the client's half, given the config of the training message; None if
        the exchanges of this message do not travel so.
        """
        return None


def send_until(
    grid: Grid, messages: Sequence[Message], enough: Enough
) -> dict[int, Message]:
    """Send all messages; return the replies by node id when all have arrived or
    ``enough`` returns True.

    ``enough`` also gets the time, so the caller gives up a client when it wants to and
    logs it itself; ``ImmediateGrid.send_and_receive_until`` has one timeout and logs
    who is silent.

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
    """Return a copy of the message with further entries in its config."""
    content = RecordDict(dict(message.content))
    for key, record in of_kind(message.content, ConfigRecord).items():
        content[key] = ConfigRecord({**record, **config})
    return Message(content, message.metadata.dst_node_id, message.metadata.message_type)

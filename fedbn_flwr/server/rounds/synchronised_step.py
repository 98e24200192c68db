"""The server half of a synchronised step: send the training messages, answer the
exchanges, count the traffic.

Here the clients exchange through a barrier in the server's process.
``server.rounds.step_by_messages`` needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.batchnorm.sync import Combine, combine
from fedbn_flwr.errors import EngineError
from fedbn_flwr.messages.kinds import of_kind
from fedbn_flwr.messages.protocol import (
    BARRIER,
    CHANNEL_ADDRESS,
    CHANNEL_CA,
    CHANNEL_TIMEOUT,
    CHANNEL_TOKEN,
    without_empty,
)
from fedbn_flwr.server.runs.report import Traffic
from fedbn_flwr.transport import Barrier, BarrierGrid, Member
from fedbn_flwr.transport.polling_grid import Pauses, in_simulation, over_network, polls

if TYPE_CHECKING:  # imported where a channel is opened
    from fedbn_flwr.transport.channel_server import ChannelServer

__all__ = [
    "Enough",
    "Limits",
    "StepResult",
    "send_until",
    "step_by_barrier",
    "step_by_channel",
    "with_config",
]

ENDED = "ended its work before the step was done"
Enough = Callable[[Mapping[int, Message], float], bool]
"""``enough(replies, seconds)``: whether to stop, given the replies by node id and the
seconds waited so far.
"""

_PAUSES = Pauses(0.02, 0.001, 0.1)  # a step has many exchanges of a few milliseconds
# At a poll the others are told of a client that has failed, so it is not put off.
_PAUSES_OVER_NETWORK = Pauses(1 / 16, 0.1, 1.0, whole=True, first=0.1)


@dataclass(frozen=True)
class Limits:
    """The limits after which a synchronised step is given up, and the arithmetic of its
    exchanges.

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


def step_by_barrier(
    grid: Grid,
    barriers: BarrierGrid,
    messages: Sequence[Message],
    members: Mapping[int, Member],
    limits: Limits,
) -> StepResult:
    """Send each client one training message; the clients wait for each other at a
    barrier in this process.

    ``barriers`` is the same object as ``grid``.
    """
    barrier_id = str(uuid4())
    barrier = Barrier(
        members,
        limits.exchange_timeout,
        limits.min_members,
        limits.answer,
        in_turns=True,
    )
    barriers.open_barrier(barrier_id, barrier)
    try:
        return _run(
            grid,
            [with_config(message, {BARRIER: barrier_id}) for message in messages],
            barrier,
            limits,
        )
    finally:
        _release(barrier)
        barriers.close_barrier(barrier_id)


def step_by_channel(
    grid: Grid,
    channel: ChannelServer,
    messages: Sequence[Message],
    members: Mapping[int, Member],
    limits: Limits,
) -> StepResult:
    """Send each client one training message with its own token; the clients exchange
    through the server's port.

    Raises:
        EngineError: Flower's simulation does not run all clients at the same time.
    """
    barrier = Barrier(
        members, limits.exchange_timeout, limits.min_members, limits.answer
    )
    tokens = channel.admit(barrier)
    about: dict[str, Any] = {
        CHANNEL_ADDRESS: channel.address,
        CHANNEL_CA: channel.certificate,
    }
    config: dict[str, Any] = {
        **without_empty(about),
        CHANNEL_TIMEOUT: limits.exchange_timeout,
    }
    try:
        own = [
            with_config(m, {**config, CHANNEL_TOKEN: tokens[m.metadata.dst_node_id]})
            for m in messages
        ]
        result = _run(grid, own, barrier, limits)
        if in_simulation(grid) and barrier.never_began:  # it would fail in every round
            raise EngineError(
                f"{len(barrier.never_began)} of {len(members)} clients"
                f" {barrier.never_began[0]}"
            )
        return result
    finally:
        _release(barrier)
        channel.dismiss(barrier)


def _run(
    grid: Grid, messages: Sequence[Message], barrier: Barrier, limits: Limits
) -> StepResult:
    """Send the messages; wait until all clients that were not dropped have replied, at
    most ``reply_timeout``.
    """

    def enough(replies: Mapping[int, Message], seconds: float) -> bool:
        for node_id in replies:  # a client that has finished the step is not dropped
            barrier.leave(node_id, ENDED)
        barrier.drop_late()
        return seconds > limits.reply_timeout or all(
            i in replies or i in barrier.dropped for i in barrier.members
        )

    replies = send_until(grid, messages, enough)
    sizes = barrier.bytes_down, barrier.bytes_up, barrier.apart_down, barrier.apart_up
    moved, members = Traffic(barrier.exchanges, *sizes), barrier.finished_with()
    dropped = {
        i: reason
        for i, reason in barrier.dropped.items()
        if i not in members or reason != ENDED
    }
    return StepResult(list(replies.values()), moved, members, dropped)


def _release(barrier: Barrier) -> None:
    """Drop the members that still wait, for example after Ctrl-C: else the command ends
    only after their timeout.
    """
    for node_id in barrier.members:
        barrier.leave(node_id, ENDED)


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
    for arrived, waiting, seconds in polls(
        grid, messages, _PAUSES_OVER_NETWORK if over_network(grid) else _PAUSES
    ):
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

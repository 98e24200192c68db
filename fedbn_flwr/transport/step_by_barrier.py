"""A synchronised step whose clients meet at a barrier in this process.

They meet inside the engine's process, or through the server's port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import uuid4

from flwr.app import Message
from flwr.serverapp import Grid

from fedbn_flwr.messages.protocol import BARRIER
from fedbn_flwr.messages.records import Traffic
from fedbn_flwr.transport.barrier import Barrier, BarrierGrid, Member
from fedbn_flwr.transport.step_transport import (
    Limits,
    StepResult,
    send_until,
    with_config,
)

_ENDED = "ended its work before the step was done"


def step_by_barrier(
    grid: Grid,
    barriers: BarrierGrid,
    messages: Sequence[Message],
    members: Mapping[int, Member],
    limits: Limits,
) -> StepResult:
    """Send one training message to each client, and let them meet at a barrier.

    The barrier is in this process. ``barriers`` is the same object as ``grid``.
    """
    barrier_id = str(uuid4())
    barrier = Barrier(
        members,
        limits.exchange_timeout,
        limits.min_members,
        in_turns=True,
    )
    barriers.open_barrier(barrier_id, barrier)
    try:
        own = [with_config(message, {BARRIER: barrier_id}) for message in messages]
        return play_step(grid, own, barrier, limits)
    finally:
        release(barrier)
        barriers.close_barrier(barrier_id)


def play_step(
    grid: Grid, messages: Sequence[Message], barrier: Barrier, limits: Limits
) -> StepResult:
    """Send the messages, and wait until all clients have replied or were dropped.

    The wait ends at the latest after ``reply_timeout``.
    """

    def enough(replies: Mapping[int, Message], seconds: float) -> bool:
        # A client that has replied takes no further part, so the others must not
        # wait. ``leave`` does not drop clients that have finished the step.
        for node_id in replies:
            barrier.leave(node_id, _ENDED)
        barrier.drop_late()
        if seconds > limits.reply_timeout:
            return True
        return all(i in replies or i in barrier.dropped for i in barrier.members)

    replies = send_until(grid, messages, enough)
    traffic = Traffic(
        barrier.exchanges,
        barrier.bytes_down,
        barrier.bytes_up,
        barrier.apart_down,
        barrier.apart_up,
    )
    members = barrier.finished_with()
    # Leave out members that ended after their last exchange, because their replies have
    # the reason.
    dropped = {
        node_id: reason
        for node_id, reason in barrier.dropped.items()
        if node_id not in members or reason != _ENDED
    }
    return StepResult(list(replies.values()), traffic, members, dropped)


def release(barrier: Barrier) -> None:
    """Drop the members that still wait, for example after Ctrl-C.

    Otherwise the command would end only after their timeout.
    """
    for node_id in barrier.members:
        barrier.leave(node_id, _ENDED)

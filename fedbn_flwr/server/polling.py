"""Sending to the clients of a round and receiving until enough of them have answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedbn_flwr.transport.polling_grid import pull, push

__all__ = ["Enough", "send_until"]

Enough = Callable[[Mapping[int, Message], float], bool]
"""``enough(replies, seconds)``: whether to stop, given the replies by node id and the seconds waited so far."""

_SHARE, _FIRST_WAIT, _LONGEST_WAIT = 0.02, 0.001, 0.1


def send_until(grid: Grid, messages: Sequence[Message], enough: Enough) -> dict[int, Message]:
    """Send all messages; return the replies by node id when all have arrived or ``enough`` returns True.

    ``enough`` also gets the time, so the caller gives up a client when it wants to and logs it itself;
    ``ImmediateGrid.send_and_receive_until`` has one timeout and logs who is silent. A step has many exchanges of a few
    milliseconds, so the pause between polls is 2% of the time waited so far, at least 1 ms and at most 0.1 s.

    Raises:
        EngineError: the messages could not be pushed.
    """
    waiting = push(grid, messages)
    start, replies = time.monotonic(), dict[int, Message]()
    while waiting:
        replies |= {reply.metadata.src_node_id: reply for reply in pull(grid, waiting)}
        seconds = time.monotonic() - start
        if not waiting or enough(replies, seconds):
            break
        time.sleep(min(max(_SHARE * seconds, _FIRST_WAIT), _LONGEST_WAIT))
    return replies

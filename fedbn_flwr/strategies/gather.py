"""Sending to the clients of a round and receiving until enough of them have answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING

from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr.errors import EngineError

__all__ = ["Enough", "gather"]

Enough = Callable[[Mapping[int, Message], float], bool]
"""``enough(replies, seconds)``: whether to stop, given the replies so far by node id and the seconds waited."""

_SHARE, _FIRST_WAIT, _LONGEST_WAIT = 0.02, 0.001, 0.1


def gather(grid: Grid, messages: Sequence[Message], enough: Enough) -> dict[int, Message]:
    """Send all messages; return the replies by node id, once all are there or ``enough`` says so.

    Beside ``Grid.send_and_receive`` this does not wait for clients the caller has given up. It polls every 2% of the
    time waited, at least 1 ms and at most 0.1 s.

    Raises:
        EngineError: the messages could not be pushed.
    """
    node_ids = [message.metadata.dst_node_id for message in messages]
    message_ids = list(grid.push_messages(messages))
    if len(message_ids) != len(messages):  # Flower's answer to a payload it refuses as a whole
        raise EngineError(
            f"only {len(message_ids)} of {len(messages)} messages could be pushed (too large? the log says why)"
        )
    waiting = {i: node_id for i, node_id in zip(message_ids, node_ids, strict=True) if i}
    if lost := [str(node_id) for i, node_id in zip(message_ids, node_ids, strict=True) if not i]:
        log(WARNING, "Messages to node(s) %s could not be pushed; going on without.", ", ".join(lost))
    start, replies = time.monotonic(), dict[int, Message]()
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            # By the message it answers: the error reply for a lost node does not carry that node's id.
            node_id = waiting.pop(reply.metadata.reply_to_message_id, None)
            if node_id is not None:
                reply.metadata.__dict__["_src_node_id"] = node_id
                replies[node_id] = reply
        seconds = time.monotonic() - start
        if not waiting or enough(replies, seconds):
            break
        time.sleep(min(max(_SHARE * seconds, _FIRST_WAIT), _LONGEST_WAIT))
    return replies

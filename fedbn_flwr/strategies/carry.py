"""The server's half of the carriers: opens a round's exchanges over a Grid, and accounts for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.carriers import Meeting, Member
from fedbn_flwr.carriers.channel import ChannelServer
from fedbn_flwr.journal import ANSWERS
from fedbn_flwr.records import from_record, num_bytes, tensors, to_record
from fedbn_flwr.strategies.report import Traffic
from fedbn_flwr.syncbn import combine

__all__ = ["Carry", "carry_by_channel", "carry_by_meeting", "carry_by_messages"]


@dataclass
class Carry:
    """The exchanges of one round, under way or done.

    Attributes:
        messages: what is still to be sent to the clients.
        finish: ends the exchanges; returns their traffic and, by node id, why a client was dropped.
        replies: what they have replied already.
        exchanges: how many an undisturbed round takes, where that is known, without the model's.
    """

    messages: list[Message]
    finish: Callable[[], tuple[Traffic, Mapping[int, str]]]
    replies: list[Message] = field(default_factory=list)
    exchanges: int = 0

    def close(self, traffic: Traffic) -> Mapping[int, str]:
        """End the exchanges, add what they moved to ``traffic`` and return who was dropped, and why."""
        moved, dropped = self.finish()
        traffic.exchanges += moved.exchanges
        traffic.down += moved.down
        traffic.up += moved.up
        return dropped


def carry_by_meeting(
    grid: Any, messages: Sequence[Message], members: Mapping[int, Member], timeout: float, min_members: int
) -> Carry:
    """Let the clients meet in this process, at a barrier of ``grid``; each gets its one TRAIN message."""
    meeting = Meeting(members, timeout, min_members)
    meeting_id = str(uuid4())
    grid.open_meeting(meeting_id, meeting)

    def finish() -> tuple[Traffic, Mapping[int, str]]:
        grid.close_meeting(meeting_id)
        return _moved(meeting), meeting.dropped

    told = {"fedtan-meeting": meeting_id}
    return Carry([_with(message, told) for message in messages], finish)


def carry_by_channel(
    channel: ChannelServer,
    messages: Sequence[Message],
    members: Mapping[int, Member],
    timeout: float,
    min_members: int,
) -> Carry:
    """Let the clients meet behind the server's port; each gets its one TRAIN message, with a token of its own."""
    meeting = Meeting(members, timeout, min_members)
    tokens = channel.admit(meeting)

    def finish() -> tuple[Traffic, Mapping[int, str]]:
        channel.dismiss(meeting)
        return _moved(meeting), meeting.dropped

    told = {"fedtan-address": channel.address, "fedtan-ca": channel.certificate, "fedtan-timeout": timeout}
    return Carry([_with(m, {**told, "fedtan-token": tokens[m.metadata.dst_node_id]}) for m in messages], finish)


def carry_by_messages(
    grid: Grid,
    messages: Sequence[Message],
    members: Mapping[int, Member],
    timeout: float,
    last_timeout: float,
    min_members: int,
    expected: int,
) -> Carry:
    """Drive the exchanges with TRAIN messages, as many as it takes; the last replies hold the models.

    Every message after the first carries the newest answer alone: model, batch and earlier answers stay in the
    client's ``Context.state``. A client that fails, stalls or sends what cannot be used is dropped, and the others
    begin again. Clients that are through with the step do the rest of the round (local steps 2..E) and reply with the
    model. That may take ``last_timeout`` seconds, an exchange ``timeout``; which is which is known from the number of
    exchanges ``expected`` by earlier rounds (0 = not known yet).
    """
    first = {message.metadata.dst_node_id: message for message in messages}
    left = dict(members)
    dropped: dict[int, str] = {}
    traffic = Traffic()
    attempt, step, answer = 0, 0, ArrayRecord()
    begun = False
    while len(left) >= min_members:
        told = {"fedtan-attempt": attempt, "fedtan-union": sum(member.batch_size for member in left.values())}
        outgoing = [_exchange(first[node_id], answer, told, begun) for node_id in left]
        limit = timeout if step < expected else last_timeout
        replies = {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(outgoing, timeout=limit)}
        begun = True
        sent, done, lost = _sort(left, replies, limit)
        if done and not sent:
            dropped.update(lost)
            return Carry([], lambda: (traffic, dropped), list(done.values()), step)
        for node_id in done:
            lost[node_id] = "was done with the step when others were not"
        if lost:
            dropped.update(lost)
            left = {node_id: member for node_id, member in left.items() if node_id not in lost}
            attempt, step, answer = attempt + 1, 0, ArrayRecord()
            continue
        (tag, _), *_ = sent.values()
        weights = [left[node_id].weight for node_id in left]
        total = combine(tag, [sent[node_id][1] for node_id in left], weights)
        answer = to_record({tag: total})
        step += 1
        traffic.exchanges += 1
        traffic.down += num_bytes(answer)[0]
        traffic.up += sum(t.numel() * t.element_size() for _, t in sent.values())
    return Carry([], lambda: (traffic, dropped))


def _moved(meeting: Meeting) -> Traffic:
    return Traffic(meeting.exchanges, meeting.bytes_down, meeting.bytes_up)


def _with(message: Message, told: Mapping[str, Any]) -> Message:
    """Return the message with further entries in its config."""
    content = RecordDict(dict(message.content))
    for key, record in message.content.config_records.items():
        content[key] = ConfigRecord({**record, **told})
    return Message(content, message.metadata.dst_node_id, message.metadata.message_type)


def _exchange(first: Message, answer: ArrayRecord, told: Mapping[str, Any], begun: bool) -> Message:
    """Return the message of one exchange: the model only in the first of the round."""
    message = _with(first, told)
    if begun:
        for key in message.content.array_records:
            message.content[key] = ArrayRecord()
    message.content[ANSWERS] = answer
    return message


_Sent = tuple[str, torch.Tensor]


def _sort(
    left: Mapping[int, Member], replies: Mapping[int, Message], limit: float
) -> tuple[dict[int, _Sent], dict[int, Message], dict[int, str]]:
    """Sort the replies: tensors of the next exchange, models of clients that are done, and who is lost and why."""
    sent: dict[int, _Sent] = {}
    done: dict[int, Message] = {}
    lost: dict[int, str] = {}
    for node_id in left:
        reply = replies.get(node_id)
        if reply is None:
            lost[node_id] = f"did not answer an exchange within {limit:g} s"
        elif reply.has_error():
            lost[node_id] = f"failed in mid-step: error {reply.error.code}: {reply.error.reason}"
        elif len(record := reply.content.array_records.get(ANSWERS, ArrayRecord())) == 0:
            done[node_id] = reply
        else:
            (tag, array), *more = from_record(record).items()
            if more or not np.isfinite(array).all():
                lost[node_id] = f"sent a value that is not finite in exchange '{tag}'"
            else:
                sent[node_id] = (tag, tensors({tag: array})[tag])
    kinds = {node_id: (tag, tuple(t.shape), t.dtype) for node_id, (tag, t) in sent.items()}
    if kinds:
        usual, _ = Counter(kinds.values()).most_common(1)[0]
        for node_id, kind in kinds.items():
            if kind != usual:
                lost[node_id] = f"sent {kind} where the others sent {usual}"
                del sent[node_id]
    return sent, done, lost

"""Replies that are damaged on the way to the server, or that never arrive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.client import client_app
from fedbn_flwr.messages.records import from_record, to_record
from tests.support.federation import RecordingGrid
from tests.support.in_process import app_of

BAD = 1
"""The partition of the bad client."""
Spoil = Callable[[RecordDict], None]


def spoiling(
    spoil: Spoil,
    *,
    kind: str | Collection[str] = MessageType.TRAIN,
    rounds: Collection[int] | None = None,
    who: Collection[int] = (BAD,),
) -> Callable[[Callable[[Context], Any]], ClientApp]:
    """Return a function that makes the usual app, with partitions ``who`` as liars.

    They damage the replies to messages of these kinds, in these rounds.
    """
    kinds = {kind} if isinstance(kind, str) else set(kind)

    def wrap(client_fn: Callable[[Context], Any]) -> ClientApp:
        whole = client_app(client_fn)

        def answer(message: Message, context: Context) -> Message:
            configs = [*message.content.config_records.values(), ConfigRecord()]
            server_round = configs[0].get("server-round")
            reply = whole(message, context)
            is_bad = context.node_config["partition-id"] in who
            asked = message.metadata.message_type in kinds
            if is_bad and asked and (rounds is None or server_round in rounds):
                spoil(reply.content)
            return reply

        return app_of(answer)

    return wrap


def fail(content: RecordDict) -> None:
    """Raise the error of a client, as a spoil."""
    raise RuntimeError("disk full")


def spoil_state(change: Callable[[dict[str, Array]], Any]) -> Spoil:
    """Return a function that applies ``change`` to the state in a reply."""

    def spoil(content: RecordDict) -> None:
        state = from_record(content["arrays"])
        change(state)
        content["arrays"] = to_record(state)

    return spoil


def spoil_entry(name: str, change: Callable[[Array], Array]) -> Spoil:
    """Return a function that applies ``change`` to an entry of the state in a reply."""
    return spoil_state(lambda state: state.update({name: change(state[name])}))


def put(value: float, index: int = 0) -> Callable[[Array], Array]:
    """Return a change that puts the value at this place of an array."""

    def change(array: Array) -> Array:
        array.flat[index] = value
        return array

    return change


def lose_replies(
    monkeypatch: pytest.MonkeyPatch,
    lost: Mapping[int, int],
    code: int | None = None,
    kind: str = MessageType.TRAIN,
) -> None:
    """Lose one partition's replies to messages of a kind, chosen by round.

    Errors with this code come in their place.
    """
    send = RecordingGrid.send_and_receive

    def send_and_receive(
        grid: RecordingGrid, messages: Any, *, timeout: float | None = None
    ) -> list[Message]:
        asked = list(messages)
        if not asked or asked[0].metadata.message_type != kind:
            return send(grid, asked, timeout=timeout)
        partition = lost.get(asked[0].content["config"]["server-round"])
        arrived = []
        for reply in send(grid, asked, timeout=timeout):
            node_id = reply.metadata.src_node_id
            if grid.partition(node_id) != partition:
                arrived.append(reply)
            elif code is not None:
                (message,) = [m for m in asked if m.metadata.dst_node_id == node_id]
                arrived.append(Message(Error(code, "lost"), reply_to=message))
        return arrived

    monkeypatch.setattr(RecordingGrid, "send_and_receive", send_and_receive)

"""The mod ``packed`` shows ordinary records to other mods and to the app.

The app announces the mod to the server if the mod comes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import message_size_mod

from fedbn_flwr import client_app
from fedbn_flwr.errors import PackingError
from fedbn_flwr.messages.packing import in_one_piece, is_packed, unpacked
from fedbn_flwr.messages.protocol import NodeProperties
from fedbn_flwr.messages.records import encode, to_record
from fedbn_flwr.mods import bn_mod, packed

MODEL = {"w": np.float32([1, 2]), "n": np.array(3)}


def message(kind: str = "train", pack: bool = True) -> Message:
    content = RecordDict(
        {"arrays": to_record(MODEL), "config": ConfigRecord({"server-round": 1})}
    )
    return Message(in_one_piece(content) if pack else content, 5, kind)


def context() -> Context:
    return Context(1, 5, {"partition-id": 2}, RecordDict(), {})


def app(*mods) -> ClientApp:
    made = ClientApp(mods=list(mods))

    @made.train()
    def train(message: Message, context: Context) -> Message:
        return Message(
            RecordDict(
                {"arrays": message.content["arrays"], "m": MetricRecord({"n": 1})}
            ),
            reply_to=message,
        )

    @made.query()
    def query(message: Message, context: Context) -> Message:
        return Message(RecordDict(dict(NodeProperties(2, 4).write())), reply_to=message)

    return made


@pytest.mark.parametrize("pack", [True, False])
def test_mods_and_app_see_records_and_the_reply_is_as_the_message(pack: bool) -> None:
    seen = []

    def looking(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        seen.extend([list(message.content), list(reply.content)])
        return reply

    given = message(pack=pack)
    reply = app(packed, looking, message_size_mod, bn_mod)(given, context())
    assert seen == [["arrays", "config"], ["arrays", "m", "properties"]]
    assert is_packed(reply.content) == pack
    found = unpacked(reply.content) if pack else reply.content
    assert list(found) == seen[1]
    assert found["arrays"] == to_record(MODEL)
    assert "fedbn-flwr.packs" not in found["properties"]


def test_the_app_says_that_it_can_if_the_mod_is_the_first() -> None:
    query = Message(RecordDict(), 5, "query")

    def said(*mods) -> object:
        return NodeProperties.read(app(*mods)(query, context())).packs

    assert (said(packed), said(packed, bn_mod), said()) == (1, 1, None)
    assert said(bn_mod, packed) is None is said(message_size_mod, bn_mod, packed)


@pytest.mark.parametrize("on_node", [True, False])
def test_client_app_has_it_as_its_first_mod_at_a_supernode(
    on_node: bool, monkeypatch
) -> None:
    monkeypatch.setattr(
        "fedbn_flwr.client.message_app.on_network_node", lambda: on_node
    )
    app = client_app(lambda context: NumPyClient(), [bn_mod])
    assert NodeProperties.read(
        app(Message(RecordDict(), 5, "query"), context())
    ).packs == (1 if on_node else None)


def test_a_damaged_message_is_an_error_of_its_own() -> None:
    damaged = message()
    damaged.content["fedbn-flwr.packed"] = ArrayRecord(
        {"a": encode(np.zeros(9, np.uint8))}
    )
    with pytest.raises(PackingError):
        packed(
            damaged, context(), lambda message, context: pytest.fail("it was called")
        )

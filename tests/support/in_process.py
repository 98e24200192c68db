"""An app of one function, and its messages in the in-process engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.engines import InProcessGrid


def empty_context() -> Context:
    """Return the context of a node without configs and state."""
    return Context(1, 1, {}, RecordDict(), {})


def answer(message: Message, context: Any = None) -> Message:
    """Return a reply without records."""
    return Message(RecordDict(), reply_to=message)


def echo(message: Message, context: Any = None) -> Message:
    """Return a reply with the records of the message."""
    return Message(message.content, reply_to=message)


def app_of(handler: Callable) -> ClientApp:
    """Return an app that answers every kind of message with ``handler``."""
    app = ClientApp()
    queries = app.query(), app.query("statistics"), app.query("exchange")
    for register in (app.train(), app.evaluate(), *queries):
        register(handler)
    return app


def to(
    grid: InProcessGrid,
    *partitions: int,
    kind: str = MessageType.TRAIN,
    content: RecordDict | None = None,
) -> list:
    nodes = grid.get_node_ids()
    return [Message(content or RecordDict(), nodes[i], kind) for i in partitions]

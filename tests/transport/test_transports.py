"""The table of transports lists the transports that a setting allows.

Each transport describes itself.
"""

from __future__ import annotations

import typing

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies.fedtan import FedTANParams
from fedbn_flwr.transport import Member
from fedbn_flwr.transport.step_transport import Limits, LinkSettings
from fedbn_flwr.transport.transports import TRANSPORTS
from tests.support.in_process import answer, to


def test_the_setting_allows_the_names_of_the_mapping() -> None:
    allowed = FedTANParams.model_fields["fedtan_transport"].annotation
    assert typing.get_args(allowed) == tuple(TRANSPORTS)


@pytest.mark.parametrize("exchanges", [0, 1])
def test_by_messages_the_batch_of_one_that_fails_counts_if_it_was_exchanged(
    exchanges: int,
) -> None:
    """The second client fails in the message that ends the step."""
    app = ClientApp()

    @app.query("exchange")
    def exchange(message: Message, context: Context) -> Message:
        done = "fedtan" in message.content and bool(message.content["fedtan"])
        if exchanges and not done:
            sent = to_record({"mean/0": np.ones(1)})
            return Message(RecordDict({"fedtan": sent}), reply_to=message)
        if context.node_config["partition-id"] == 1:
            raise RuntimeError("out of cheese")
        return answer(message)

    app.train()(answer)
    records = {"arrays": to_record({"w": np.ones(1)}), "config": ConfigRecord()}
    with InProcessGrid(app, 2) as grid:
        first, second = grid.get_node_ids()
        messages = to(grid, 0, 1, content=RecordDict(records))
        members = {i: Member(1, 2, f"node {i}") for i in (first, second)}
        transport = TRANSPORTS["messages"](LinkSettings())
        result = transport.step(grid, messages, members, Limits(9, 9, 1))
    assert list(result.members) == ([first, second] if exchanges else [first])
    assert result.dropped.keys() == (set() if exchanges else {second})

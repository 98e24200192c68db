"""Runs with arrays in one piece equal runs with separate arrays.

Bits and traffic are equal, and a bad piece is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fedbn_flwr.client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages.packing import is_packed
from fedbn_flwr.messages.protocol import EXCHANGE_QUERY, PACKS
from fedbn_flwr.messages.records import from_record, of_kind, to_record
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN, Scaffold, StaticBN
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.transport import polling_grid
from fedbn_flwr.transport.polling_grid import PollingGrid
from tests.support.fast import thinned
from tests.support.federation import torch_clients
from tests.support.in_process import app_of
from tests.support.user_loops import SIZES

ROUNDS = 2


class Line(InProcessGrid):
    """Nodes of this process that record sent messages and replies in ``travelled``."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.travelled = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        batch = list(messages)
        self.travelled += batch
        return super().push_messages(batch)

    def pull_messages(self, *args, **options) -> list[Message]:
        replies = super().pull_messages(*args, **options)
        self.travelled += [
            SimpleNamespace(content=r.content, metadata=r.metadata)
            for r in replies
            if r.has_content()
        ]
        return replies


@pytest.fixture(autouse=True)
def _on_a_node(monkeypatch) -> None:
    """Let ``client_app`` make its apps as in a SuperNode's process."""
    monkeypatch.setattr("fedbn_flwr.client.message_app.on_network_node", lambda: True)


@pytest.fixture
def run(mlp, datasets) -> Iterator[Callable]:
    """``run(strategy, packs=True, wrap=client_app)`` runs ``ROUNDS`` rounds."""
    with ExitStack() as grids:

        def do(
            strategy: Any,
            packs: bool | None = True,
            wrap: Callable[[Any], Any] = client_app,
        ):
            training = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
            app = wrap(torch_clients(mlp, datasets, training))
            line = grids.enter_context(Line(app, len(datasets)))
            start = to_record(mlp().state_dict())
            result = strategy.start(PollingGrid(line, packs), start, num_rounds=ROUNDS)
            return SimpleNamespace(line=line, strategy=strategy, result=result)

        yield do


def with_arrays(line: Line) -> list[Message]:
    return [
        m
        for m in line.travelled
        if is_packed(m.content) or of_kind(m.content, ArrayRecord)
    ]


def kept(line: Line) -> list:
    return [
        dict(record)
        for i in range(len(SIZES))
        for record in line.context(i).state.array_records.values()
    ]


RUNS = {
    "fedbn": FedBN,
    "fedtan": lambda: FedTAN(fedtan_transport="messages"),
    "scaffold": Scaffold,
    "staticbn": StaticBN,
}


@pytest.mark.parametrize("method", thinned(RUNS, 2))
def test_bits_and_traffic_are_those_of_arrays_one_by_one(
    method: str, run, same_bits
) -> None:
    ours, plain = run(RUNS[method]()), run(RUNS[method](), packs=False)
    same_bits(*(from_record(one.result.arrays) for one in (ours, plain)))
    assert vars(ours.result).keys() == vars(plain.result).keys()
    for one, other in zip(ours.strategy.reports, plain.strategy.reports, strict=True):
        assert one == other
        assert (one.replied, one.rejected) == (len(SIZES), {})
    assert kept(ours.line) == kept(plain.line)
    assert all(is_packed(message.content) for message in with_arrays(ours.line))
    assert not any(is_packed(message.content) for message in with_arrays(plain.line))
    kinds = {message.metadata.message_type for message in with_arrays(ours.line)}
    assert (EXCHANGE_QUERY in kinds) == (method == "fedtan")


@pytest.mark.parametrize("network", [True, False])
def test_it_is_the_way_over_a_network_and_nowhere_else(
    network: bool, run, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(polling_grid, "is_network_grid", lambda grid: network)
    with caplog.at_level(logging.INFO, logger="flwr"):
        for wrap, forms in ((client_app, {network}), (one_older, {False, network})):
            messages = with_arrays(run(FedAvg(), None, wrap).line)
            assert {is_packed(message.content) for message in messages} == forms
    advice = [
        record.args for record in caplog.records if record.funcName == "_advise_packing"
    ]
    assert advice == [(1, len(SIZES))] * network, "only the second run gives advice"


def one_older(client_fn) -> ClientApp:
    """Return an app whose second node lacks the mod."""
    whole = client_app(client_fn)

    def answer(message: Message, context: Context) -> Message:
        reply = whole(message, context)
        if context.node_config["partition-id"] == 1:
            assert not is_packed(message.content)
            if message.metadata.message_type == "query":
                del reply.content["properties"][PACKS]
        return reply

    return app_of(answer)

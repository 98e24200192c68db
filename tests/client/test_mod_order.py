"""Order of other people's mods and our mod, and errors for wrong orders.

Flower's mods for differential privacy expect one record in each direction, with the
same names, in every message that they see.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp, mod
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping

from fedbn_flwr.client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ClientPartError, ConfigError
from fedbn_flwr.messages.protocol import SERVER_ROUND, Continuity
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.mods import bn_mod
from fedbn_flwr.strategies import (
    Ditto,
    FedAvg,
    FedBN,
    FedTAN,
    Scaffold,
    StaticBN,
    Strategy,
)
from tests.support.in_process import to
from tests.support.user_loops import SIZES, hooked_loop

ADVICE = "Put bn_mod first, ClientApp(mods=[bn_mod])"
local_dp_mod = LocalDpMod(clipping_norm=100.0, sensitivity=0.0, epsilon=1.0, delta=0.5)
PRIVATE = {"fixedclipping_mod": fixedclipping_mod, "LocalDpMod": local_dp_mod}


@pytest.fixture
def run_private(mlp) -> Callable[[Strategy, ClientApp], Strategy]:
    """``run_private(strategy, app)`` runs two rounds within Flower's wrapper.

    The wrapper sends the norm for clipping.
    """

    def run(strategy: Strategy, app: ClientApp) -> Strategy:
        private = DifferentialPrivacyClientSideFixedClipping(
            strategy, 0.0, 100.0, len(SIZES)
        )
        with InProcessGrid(app, len(SIZES)) as grid:
            private.start(grid, to_record(mlp().state_dict()), num_rounds=2, timeout=30)
        return strategy

    return run


def assert_all_work(strategy: Strategy) -> None:
    """Assert that all clients trained and were tested in two rounds."""
    assert len(strategy.reports) == 2
    for report in strategy.reports:
        assert (report.participants, report.rejected) == ([0, 1, 2], {})
        assert list(report.evaluations) == ["0", "1", "2"]


@pytest.mark.parametrize("name", PRIVATE)
def test_with_bn_mod_first_and_the_mod_on_training_everything_passes(
    run_private, user_app, name: str
) -> None:
    app = user_app(query=True, train_mods=[PRIVATE[name]])
    assert_all_work(run_private(FedBN(), app))


@pytest.mark.parametrize("name", PRIVATE)
def test_a_mod_of_the_whole_app_lets_the_nodes_train_and_is_named(
    run_private, user_app, name: str, caplog
) -> None:
    """The mod refuses queries and evaluations, but clients still train."""
    strategy = run_private(FedAvg(), user_app(mods=[PRIVATE[name]], query=True))
    assert [report.participants for report in strategy.reports] == [[None] * 3] * 2
    assert ADVICE in caplog.text
    for why in strategy.reports[0].rejected.values():
        assert name in why
        assert ADVICE in why


def reading(message: Message, context: Context, call_next: Any) -> Message:
    """A mod that reads an entry of the training messages' config in every message."""
    _ = message.content["config"]["fedbn-flwr.hooks"]
    return call_next(message, context)


NAMED = rf"LocalDpMod .*{re.escape(ADVICE)}"
READS = r"(?s)fedbn-flwr\.hooks.*train_mods="
# A method, the mods of the app and of its training function, and the error.
WRONG = [
    (FedTAN, [local_dp_mod], [], ConfigError, NAMED),
    (FedTAN, [bn_mod, local_dp_mod], [], ConfigError, NAMED),
    (FedTAN, [reading, bn_mod], [], ConfigError, READS),
    (FedTAN, [bn_mod, reading], [], ConfigError, READS),
    # The method asks for a change that a loop of the app cannot make.
    (Ditto, [bn_mod], [], ConfigError, "ditto .* needs a TorchClient"),
    (partial(FedBN, recalibrate=True), [bn_mod], [], ConfigError, "need a TorchClient"),
    # The reply lacks the local entries, and the mod would answer its own reply.
    (FedBN, [local_dp_mod, bn_mod], [], ClientPartError, NAMED),
    (FedBN, [], [local_dp_mod, bn_mod], ClientPartError, NAMED),
]


@pytest.mark.parametrize(("make", "mods", "train_mods", "kind", "said"), WRONG)
def test_a_wrong_order_ends_the_run_with_the_name_of_the_mod(
    run_app, user_app, make, mods, train_mods, kind, said
) -> None:
    app = user_app(hooked_loop, mods, query=True, train_mods=train_mods)
    with pytest.raises(kind, match=said):
        run_app(make(), app, rounds=1)


LOOKING = [getattr(mod, name) for name in mod.__all__ if name.endswith("_size_mod")]
"""Flower's mods that only look: they count the bytes of each record, and fail for an
empty text or list.
"""
METHODS = {
    "fedavg": FedAvg,
    "fedbn": lambda: FedBN(eval_on="personal-own,averaged-bn"),
    "scaffold": Scaffold,
    "staticbn": StaticBN,
    "fedtan": FedTAN,
    "fedtan by channel": lambda: FedTAN(fedtan_transport="channel"),
}


@pytest.mark.parametrize("name", METHODS)
def test_mods_that_only_look_may_stand_anywhere(run_app, user_app, name: str) -> None:
    """Each mod is before and after ours, and at the training function only."""
    strategy = METHODS[name]()
    strategy.continuity = Continuity("run-1")  # no checkpoint yet
    app = user_app(
        hooked_loop, [*LOOKING, bn_mod, *LOOKING], query=True, train_mods=LOOKING
    )
    by_channel = {"grid_options": {"threads": len(SIZES)}} if "channel" in name else {}
    run_app(strategy, app, rounds=2, barrier=False, **by_channel)
    assert_all_work(strategy)


def watching(seen: list):
    """A mod that records partition, message type and sizes of all ArrayRecords."""

    def watch(message: Message, context: Context, call_next: Any) -> Message:
        sizes = [len(record) for record in message.content.array_records.values()]
        if sizes:
            partition = context.node_config["partition-id"]
            seen.append((partition, message.metadata.message_type, sizes))
        return call_next(message, context)

    return watch


EXCHANGES = 4  # one BN layer, 3L+1: the model and three tensors


def test_mods_see_each_training_message_once(run_app, user_app, mlp) -> None:
    """FedTAN's exchanges are queries.

    A mod of the training function sees one message with the whole model, like under
    FedAvg.
    """
    outside, inside = [], []
    training = [watching(inside), local_dp_mod]
    app = user_app(
        hooked_loop, [watching(outside), bn_mod], query=True, train_mods=training
    )
    run = run_app(FedTAN(), app, rounds=2, barrier=False)
    whole = [len(mlp().state_dict())]
    assert sorted(inside) == [(i, "train", whole) for i in range(3) for _ in range(2)]
    trained = [message for message in outside if message[1] == "train"]
    assert sorted(trained) == [(i, "train", [0]) for i in range(3) for _ in range(2)]
    kinds = [message[1] for message in outside]
    assert kinds.count("query.exchange") == 2 * 3 * EXCHANGES
    exchanges = [report.train.exchanges for report in run.strategy.reports]
    assert exchanges == [EXCHANGES] * 2


def test_without_a_function_for_exchanges_they_go_as_training_messages(
    run_app, user_app, same_bits, caplog
) -> None:
    """Older apps have no such function.

    They give the same bits, and a warning names the line to add.
    """
    seen = []
    app = user_app(hooked_loop, [watching(seen), bn_mod], query=True, exchange=False)
    done = run_app(FedTAN(), app, rounds=2, barrier=False)
    assert [report.rejected for report in done.strategy.reports] == [{}, {}]
    assert caplog.text.count("Write @app.query('exchange') above @app.train()") == 1
    kinds = [message[1] for message in seen]
    assert kinds.count("train") == 2 * 3 * EXCHANGES
    assert "query.exchange" not in kinds
    newer = user_app(hooked_loop, query=True)
    same_bits(done.state, run_app(FedTAN(), newer, rounds=2, barrier=False).state)


class Noisy:
    """A mod that draws before and after its call, and sends the draws."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        before = draws()
        reply = call_next(message, context)
        reply.content["metrics"][self.place] = [*before, *draws()]
        return reply


def draws() -> list[float]:
    return [float(np.random.normal()), float(torch.rand(())), random.random()]


def the_apps_own(message: Message, context: Context) -> Message:
    arrays = next(iter(message.content.array_records.values()))
    metrics = MetricRecord({"num-examples": 1, "own": sum(draws())})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class OwnDraws(NumPyClient):
    """A client that sends its draws."""

    def fit(self, parameters, config):
        return parameters, 1, {"own": sum(draws())}


def with_own_mods() -> ClientApp:
    app = ClientApp(mods=[Noisy("outer"), bn_mod, Noisy("inner")])
    app.train(mods=[Noisy("innermost")])(the_apps_own)
    return app


def of_clients() -> ClientApp:
    return client_app(
        lambda _: OwnDraws(), mods=[Noisy("inner")], train_mods=[Noisy("innermost")]
    )


@pytest.mark.parametrize("make", [with_own_mods, of_clients])
def test_what_the_app_draws_repeats_and_nothing_that_a_mod_draws(make) -> None:
    """The server has the seed, so it could subtract noise that depends on it."""
    runs = []
    for _ in range(2):
        content = {
            "arrays": to_record({"w": np.zeros(1)}),
            "config": ConfigRecord({SERVER_ROUND: 1}),
        }
        with InProcessGrid(make(), 1) as grid:
            messages = to(grid, 0, content=RecordDict(content))
            (reply,) = grid.send_and_receive(messages)
        runs.append(dict(reply.content["metrics"]))
    first, second = runs
    assert first.pop("own") == second.pop("own")
    for place in ("inner", "innermost"):
        assert len(first[place]) == 6
        assert not set(first[place]) & set(second[place])
    after = slice(3, None)  # before our mod begins, a mod uses the engine's draws
    assert not set(first.get("outer", [])[after]) & set(second.get("outer", [])[after])

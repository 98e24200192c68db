"""Effects of the mod on messages.

The tests check the app's view, the server's view and the client's local state.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from torch import nn

from fedbn_flwr.client.mailbox import is_filled, open_outbox, take_records
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ConfigError, NothingTrainedError
from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.mods import bn_mod
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    FedProx,
    FedTAN,
    FixBN,
    Scaffold,
    Strategy,
)
from fedbn_flwr.transport import polling_grid
from fedbn_flwr.transport.polling_grid import PollingGrid
from tests.support.in_process import empty_context
from tests.support.user_loops import SIZES, hooked_loop


def test_layer_names_may_contain_slashes_in_exchanges_too(
    run_app, user_app, mlp
) -> None:
    def slashed() -> nn.Module:
        children = {f"a/{name}": child for name, child in mlp().named_children()}
        return nn.Sequential(OrderedDict(children))

    app = user_app(hooked_loop, query=True, model=slashed)
    run = run_app(FedTAN(), app, rounds=2, barrier=False, model=slashed)
    assert [report.participants for report in run.strategy.reports] == [[0, 1, 2]] * 2


@pytest.fixture
def queries(mlp, monkeypatch) -> Callable[..., list[str]]:
    """Return a function that lists the queries of two rounds by message type.

    The rounds run in process or in a simulation that has loaded these apps.
    """
    kinds = []

    class Noting(InProcessGrid):
        def _push(self, messages: Iterable[Message], *arrived: Any) -> list[str]:
            batch = list(messages)
            kinds.extend(message.metadata.message_type for message in batch)
            return super()._push(batch, *arrived)

    def run(
        strategy: Strategy, app: ClientApp, loaded: list[ClientApp] | None = None
    ) -> list[str]:
        with Noting(app, len(SIZES)) as inner:
            grid = inner
            if loaded is not None:
                grid = PollingGrid(inner)
                monkeypatch.setattr(polling_grid, "in_simulation", lambda grid: True)
                monkeypatch.setattr(polling_grid, "loaded_apps", lambda seconds: loaded)
            strategy.start(grid, to_record(mlp().state_dict()), num_rounds=2)
        assert [report.rejected for report in strategy.reports] == [{}, {}]
        return [kind for kind in kinds if kind.startswith("query")]

    return run


@pytest.mark.parametrize("simulated", [True, False], ids=["simulation", "in process"])
@pytest.mark.parametrize("kind", [FedBN, Scaffold])
def test_an_app_without_a_query_handler_is_asked_nothing(
    queries, user_app, caplog, kind, simulated: bool
) -> None:
    """Neither nodes nor the server log anything."""
    app = user_app(hooked_loop)
    with caplog.at_level("WARNING", "flwr"):
        loaded = [app] if simulated else None
        assert queries(kind(fraction_evaluate=0.5), app, loaded) == []
    # A warning about the model is expected.
    assert not [text for text in caplog.messages if " keeps" not in text]


def test_a_draw_among_nodes_that_cannot_say_who_they_are_is_told(
    queries, user_app, caplog
) -> None:
    assert queries(FedAvg(fraction_train=0.4), user_app(hooked_loop)) == []
    assert caplog.text.count("the draw of clients is not repeatable") == 1


@pytest.mark.parametrize("found", [True, False], ids=["a handler", "no app is found"])
def test_an_app_that_may_answer_is_asked(queries, user_app, found: bool) -> None:
    app = user_app(hooked_loop, query=found)
    assert len(queries(FedBN(), app, [app] * found)) == 3


# Former names of a method's keys, without the prefix.
TAKEN = ["rules", "local-parts", "local-entries", "local-sha256", "series", "run"]
TAKEN += ["committed", "frozen", "client-mod", "array-names", "proximal-mu", "agc"]
TAKEN += ["momentum-scope", "freeze-affine", "fedtan-exchanges", "fedtan-attempt"]


@pytest.mark.parametrize(
    "method", [FedBN, functools.partial(FixBN, freeze_at=1), FedProx, Scaffold, FedTAN]
)
def test_a_users_record_and_keys_reach_the_app_as_they_were_given(
    run_app, user_app, method
) -> None:
    """An example is a teacher model.

    The methods include methods with further records, or exchanges by messages. The
    method has its own keys, and a state folder adds a run.
    """
    seen = []
    own = {name: f"the user's {name}" for name in TAKEN}
    strategy = method()
    strategy.continuity = Continuity("b")
    configure = strategy.configure_train

    def with_teacher(*args):
        messages = list(configure(*args))
        for message in messages:
            message.content["teacher"] = ArrayRecord({"t": torch.ones(3)})
        return messages

    def loop(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        config = msg.content["config"]
        assert {name: config.get(name) for name in TAKEN} == own
        assert msg.content["teacher"]["t"].shape == (3,)
        seen.append(list(msg.content.array_records))
        return hooked_loop(model, data, msg, context)

    strategy.configure_train = with_teacher
    app = user_app(loop, query=True)
    run_app(strategy, app, rounds=2, barrier=False, train_config=own)
    assert [report.rejected for report in strategy.reports] == [{}, {}]
    assert seen == [["arrays", "teacher"]] * len(seen)
    assert len(seen) >= 6


def test_a_users_key_with_the_prefix_is_refused_by_name(run_app, user_app, mlp) -> None:
    config = ConfigRecord({"lr": 0.1, "fedbn-flwr.hooks": "", "fedbn-flwr.mine": 1})

    def refused(name: str, call: Callable, *args: Any, **given: Any) -> None:
        keys = rf"^{name}\['fedbn-flwr.hooks'\], {name}\['fedbn-flwr.mine'\]: keys that"
        with pytest.raises(ConfigError, match=keys):
            call(*args, **given)

    refused("train_config", run_app, FedAvg(), user_app(), train_config=config)
    # in Flower's own loops
    for configure in (FedAvg().configure_train, FedAvg().configure_evaluate):
        refused("config", configure, 1, to_record(mlp().state_dict()), config, None)


@pytest.mark.parametrize("lost", [(), (1,), (1, 2)])
@pytest.mark.parametrize("barrier", [True, False])
def test_what_an_app_writes_into_its_state_is_written_once_a_round(
    run_app, user_app, same_bits, barrier: bool, lost: tuple[int, ...]
) -> None:
    """With messages, FedTAN calls the training function for each exchange.

    If a client is lost, the step begins again, and client 2 is lost in the second
    attempt. The app may catch its errors.
    """
    attempts = {1: 1, 2: 0}

    def leave(client: int) -> None:
        attempts[client] += 1
        if attempts[client] == 2:
            raise SystemExit

    def counting(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        client = context.node_config["partition-id"]
        if msg.content["config"]["server-round"] == 1 and client in lost:
            model[3].register_forward_pre_hook(lambda *_: leave(client))
        count = context.state.setdefault("user", MetricRecord({"rounds": 0}))
        count["rounds"] += 1
        try:
            return hooked_loop(model, data, msg, context)
        except Exception as error:
            raise AssertionError("an exchange is not an error") from error

    run = run_app(FedTAN(), user_app(counting, query=True), rounds=2, barrier=barrier)
    rejected = [len(report.rejected) for report in run.strategy.reports]
    assert rejected == [len(lost), 0]
    for i in {0, 1, 2} - {*lost}:
        assert run.context(i).state["user"]["rounds"] == 2
    if not lost:
        plain = run_app(FedTAN(), user_app(hooked_loop, query=True), rounds=2)
        same_bits(run.state, plain.state)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_an_app_that_replaces_its_state_does_not_lose_the_part(
    run_app, user_app, same_bits, kind: str
) -> None:
    def replacing(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == kind:
            context.state = RecordDict({"mine": MetricRecord({"rounds": 1})})
        return reply

    run = run_app(FedBN(), user_app(mods=(bn_mod, replacing)))
    assert [report.rejected for report in run.strategy.reports] == [{}, {}, {}]
    plain = run_app(FedBN(), user_app())
    same_bits(run.state, plain.state)
    same_bits(run.local_state(0), plain.local_state(0))
    assert run.context(0).state["mine"]["rounds"] == 1


def test_what_a_hook_kept_is_not_put_back_where_the_app_loses_what_it_keeps_now(
    run_app, user_app
) -> None:
    """An older variate would be wrong, so a lost variate starts again."""

    def replacing(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        config = next(iter(message.content.config_records.values()), {})
        if message.metadata.message_type == "train" and config["server-round"] == 3:
            report = context.state["fedbn-flwr.outbox"]
            context.state = RecordDict({"fedbn-flwr.outbox": report})
        return reply

    run = run_app(
        Scaffold(fraction_evaluate=0.0), user_app(hooked_loop, mods=(bn_mod, replacing))
    )
    assert "fedbn-flwr.rules" not in run.context(0).state


def without_batchnorm(content: RecordDict) -> None:
    for name in [name for name in content["arrays"] if name.startswith("1.")]:
        del content["arrays"][name]


def under_another_key(content: RecordDict) -> None:
    content["weights"] = content.pop("arrays")


def empty(content: RecordDict) -> None:
    content["arrays"] = ArrayRecord()


@pytest.mark.parametrize("method", [FedBN, FedAvg])  # the mod refuses it, or the server
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (without_batchnorm, "1.weight"),
        (under_another_key, "'arrays'"),
        (empty, "arrays"),
    ],
)
def test_a_reply_without_the_whole_model_is_refused(
    run_app, user_app, method, spoil, named: str
) -> None:
    def change(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        if "arrays" in reply.content:
            spoil(reply.content)
        return reply

    app = user_app(mods=(bn_mod, change))
    run = run_app(method(), app, rounds=1, fails=NothingTrainedError)
    for partition in range(len(SIZES)):
        assert named in run.reason(partition)


def test_an_outbox_that_is_opened_is_empty() -> None:
    """A failed training before it may have left entries."""
    context = empty_context()
    context.state["fedbn-flwr.outbox"] = ConfigRecord({"a": 1})
    context.state["fedbn-flwr.outbox/variates"] = to_record({"w": np.ones(1)})
    open_outbox(context)
    assert not is_filled(context)
    assert take_records(context, "fedbn-flwr.outbox") == {}

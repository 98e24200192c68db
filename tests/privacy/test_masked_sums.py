"""A run with masked sums makes the model of the plain run.

This applies to any lost client, and no message reveals a client's values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.batchnorm.sync import SynchronisedStep
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.errors import (
    ConfigError,
    MaskingError,
    NormLayerError,
    ReplyError,
)
from fedbn_flwr.messages.protocol import MASKED, Continuity
from fedbn_flwr.messages.records import to_record, to_state
from fedbn_flwr.mods import bn_mod, masked_update
from fedbn_flwr.privacy.coordinates import CLIP, Coordinates
from fedbn_flwr.privacy.counters import CUMULATIVE, refuse_cumulative
from fedbn_flwr.privacy.differential import ClientLevelDP, DPSettings
from fedbn_flwr.privacy.masked_round import MaskedRound
from fedbn_flwr.privacy.masked_sums import MaskedSums, MaskSettings
from fedbn_flwr.privacy.masks import Party, PublicKeys
from fedbn_flwr.privacy.ring import FixedPoint
from fedbn_flwr.server.methods.check_protections import uncovered
from fedbn_flwr.strategies import (
    STRATEGIES,
    Extra,
    FedAdam,
    FedAvg,
    FedBN,
    FedBS,
    FedDNA,
    FedTAN,
    FixBN,
    Key,
    Method,
    Scaffold,
    StaticBN,
    Strategy,
    Travels,
)
from fedbn_flwr.transport import wrapped
from tests.support.fast import fast, thinned
from tests.support.noise import SeededNoise
from tests.support.protected import masked
from tests.support.synchronised import (
    TRANSPORTS,
    Branches,
    client_data,
    synchronised,
    trained,
)

SIZES = (12, 5, 8, 21)


def furthest(one: State, other: State) -> float:
    """Return the largest difference between two states, except in counters."""
    names = [name for name in one if "num_batches" not in name]
    return max(float(np.abs(one[name] - other[name]).max()) for name in names)


class Losing:
    """An app that fails as ``{partition: stage}`` asks in round 1.

    The stage "train" fails after the training.
    """

    def __init__(self, app: ClientApp, lost: Mapping[int, str]) -> None:
        self.app, self.lost = app, lost

    def __call__(self, message: Message, context: Context) -> Message:
        (config,) = message.content.config_records.values() or ({},)
        stage = config.get("fedbn-flwr.mask-stage") or message.metadata.message_type
        reply = self.app(message, context)
        if (
            config.get("server-round") == 1
            and self.lost.get(int(context.node_config["partition-id"])) == stage
        ):
            raise RuntimeError("power cut")
        return reply


def losing(lost: Mapping[int, str]) -> Callable[[Any], Any]:
    return lambda client_fn: Losing(client_app(client_fn), lost)


# The law.


@pytest.mark.parametrize("method", [FedAvg, FedBN, FedAdam, FixBN])
def test_a_masked_run_equals_the_plain_one(
    method, federate, datasets, mlp, tmp_path
) -> None:
    """The server's hashes of the local states in state folders are equal as well."""

    def run(strategy: Any) -> Any:
        strategy.continuity = Continuity("series", "run")
        folder = {"state-dir": str(tmp_path / str(id(strategy)))}
        nodes = {"node_configs": [folder] * 4}
        options: dict[str, Any] = {"rounds": 2, "local_steps": 2}
        return federate(strategy, mlp, datasets, grid_options=nodes, **options)

    plain = run(method())
    ours = run(masked(method(configrecord_key="settings")))
    kept, plainly = ours.strategy.run.kept, plain.strategy.run.kept
    assert kept.hashes.keys() == plainly.hashes.keys()
    assert kept.volatile == plainly.volatile == set()
    rounds = [message.content["settings"]["server-round"] for message in ours.grid.sent]
    assert rounds == sorted(rounds)
    assert 0 < furthest(plain.state, ours.state) < 1e-11
    for partition in range(4) if method is FedBN else ():
        assert (
            furthest(plain.local_state(partition), ours.local_state(partition)) < 1e-11
        )
    assert [report.participants for report in ours.strategy.reports] == [
        [0, 1, 2, 3]
    ] * 2
    assert ours.state["1.num_batches_tracked"] == {FedBN: 0, FixBN: 1}.get(method, 2), (
        "rounds"
    )
    if method is FixBN:  # frozen after round 1 of 2
        for name in ("1.running_mean", "1.running_var"):
            assert ours.history[2][name].tobytes() == ours.history[1][name].tobytes()


def test_a_torchvision_net_has_the_stated_error(
    federate, points, torchvision_net, monkeypatch
) -> None:
    """Few digits after the point make the rounding visible, within the bound."""
    data = [points(size, client, (3, 16, 16)) for client, size in enumerate((6, 3, 8))]
    value_range = 2.0**34
    monkeypatch.setattr(FixedPoint.__init__, "__defaults__", (value_range,))
    options: dict[str, Any] = {"rounds": 1, "local_steps": 1}
    plain = federate(FedAvg(fraction_evaluate=0.0), torchvision_net, data, **options)
    ours = federate(
        masked(FedAvg(fraction_evaluate=0.0)), torchvision_net, data, **options
    )
    allowed = FixedPoint(17.0, value_range).error(3, 17.0)
    assert 0.3 < furthest_in_units(plain, ours) / allowed <= 1.0


def furthest_in_units(plain: Any, ours: Any) -> float:
    """Return the largest difference of two one-round runs in masked coordinates."""
    parts, start = split_state(plain.history[0]), plain.history[0]
    one = Coordinates(start, parts, scale=1.0).update(plain.state)
    other = Coordinates(start, parts, scale=1.0).update(ours.state)
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.fixture
def branches() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = trained(Branches())
    # Without a momentum the layer counts batches, and masked sums show the server only
    # a count of rounds.
    model.a.momentum = 0.1
    return model


@pytest.mark.parametrize("method", fast([FedTAN, FedDNA], 1))
def test_a_masked_step_equals_the_plain_one(
    method, run_step, branches, same_bits
) -> None:
    """Each transport gives the same bits."""
    data = client_data((3, 6, 6), (2, 5, 1))
    plain = run_step(synchronised(method), branches, data)
    moved = plain.strategy.reports[0].train
    runs = []
    for transport in TRANSPORTS if method is FedTAN else ("barrier",):
        runs.append(
            run_step(
                masked(synchronised(method, transport)),
                branches,
                data,
                transport=transport,
            )
        )
        ours = runs[-1].strategy.reports[0].train
        assert ours.exchanges == moved.exchanges + 3
        assert (ours.down, ours.up) == (
            moved.down,
            moved.up,
        ), "float64 and int64 have the same size"
        same_bits(runs[-1].state, runs[0].state)
    assert 0 < furthest(plain.state, runs[0].state) < 1e-11


def test_a_users_app_with_the_mods(federate, datasets, mlp) -> None:
    """The app begins with ``masked_update`` and ``bn_mod``, as ``client_app`` does."""

    def app_of(client_fn: Any) -> ClientApp:
        inner, app = client_app(client_fn), ClientApp(mods=[masked_update, bn_mod])
        ours = client_fn

        @app.train()
        def train(message: Message, context: Context) -> Message:
            client = ours(context)
            model = client.model
            arrays = message.content["arrays"]
            model.load_state_dict(arrays.to_torch_state_dict())
            for parameter in model.parameters():
                parameter.data += 0.1 * (1 + int(context.node_config["partition-id"]))
            message.content["arrays"] = type(arrays)(model.state_dict())
            for key in list(message.content.config_records):
                del message.content[key]
            from flwr.app import MetricRecord

            message.content["beside"] = ArrayRecord(model.state_dict())
            message.content["metrics"] = MetricRecord(
                {"num-examples": len(client.data.train), "secret": 3.0}
            )
            return Message(message.content, reply_to=message)

        @app.query()
        def query(message: Message, context: Context) -> Message:
            return inner(message, context)

        return app

    ours = federate(
        masked(FedBN(fraction_evaluate=0.0)), mlp, datasets, rounds=2, wrap=app_of
    )
    shift = 0.1 * sum(size * (1 + i) for i, size in enumerate(SIZES)) / sum(SIZES)
    start = mlp().state_dict()
    for name in ("0.weight", "3.bias"):
        assert ours.state[name] == pytest.approx(
            start[name].numpy() + 2 * shift, abs=1e-12
        )
    assert {"1.weight", "1.running_mean"} <= set(ours.local_state(0))
    replies = [
        reply.content
        for reply in ours.grid.received
        if reply.metadata.message_type == "train"
    ]
    assert all(
        {*reply.array_records} == {"arrays"} and {*reply["arrays"]} == {MASKED}
        for reply in replies
    )


@pytest.mark.parametrize(
    "lost", fast([{}, {1: "train"}, dict.fromkeys((0, 1, 2, 3), "train")], 1)
)
def test_under_masks_the_noise_comes_to_the_sum_of_clipped_updates(
    lost: dict[int, str], federate, five, mlp
) -> None:
    """The release is the same as if the server saw the updates.

    A lost client's update is zero, and with too few answers all are zero.
    """

    def protection() -> ClientLevelDP:
        settings = DPSettings(
            dp="client", dp_noise_multiplier=0.5, dp_clipping_norm=0.05
        )
        return ClientLevelDP(settings, SeededNoise(3))

    runs = []
    for protected in (
        lambda dp: dp,
        lambda dp: MaskedSums(MaskSettings(masked_sums=True), dp),
    ):
        strategy, dp = FedAvg(fraction_evaluate=0.0), protection()
        strategy.protect(protected(dp))
        runs.append(federate(strategy, mlp, five, rounds=2, wrap=losing(lost)))
        assert len(dp.accountant.releases) == 2
        found = strategy.protection.outcome()["privacy"]
        plain = dp.outcome()["privacy"]
        assert found.pop("guarantee").startswith(plain.pop("guarantee"))
        assert found == plain
    if len(lost) < 4:
        for server_round in (1, 2):
            assert furthest(*(run.history[server_round] for run in runs)) < 1e-10
    assert furthest(runs[1].history[0], runs[1].history[1]) > 1e-3
    assert furthest(runs[0].history[0], runs[0].state) > 1e-3


def test_under_masks_epsilon_is_not_of_whether_a_client_answers(
    federate, five, mlp
) -> None:
    """The guarantee does not cover whether a client answers.

    With too few answers, the sum is 0, so one missing answer can change it by more than
    the client's update.
    """
    strategy = FedAvg(fraction_evaluate=0.0)
    dp = ClientLevelDP(
        DPSettings(dp="client", dp_noise_multiplier=5.0, dp_clipping_norm=0.05)
    )
    strategy.protect(MaskedSums(MaskSettings(masked_sums=True), dp))
    federate(strategy, mlp, five, rounds=1)
    said = strategy.protection.outcome()["privacy"]["guarantee"]
    assert said.startswith("epsilon = ")
    assert "not whether it answers" in said


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("room", [True, False])
def test_a_budget_without_room_for_round_1_asks_nobody_and_says_so(
    federate, datasets, mlp, caplog, masks: bool, room: bool
) -> None:
    dp = ClientLevelDP(
        DPSettings(dp="client", dp_target_epsilon=3.0, dp_clipping_norm=0.05)
    )
    if not room:
        dp.accountant.releases = [0.3]  # from an earlier run
    strategy = FedAvg(fraction_evaluate=0.0)
    protection = MaskedSums(MaskSettings(masked_sums=True), dp) if masks else dp
    strategy.protect(protection)
    with caplog.at_level("WARNING", "flwr"):
        run = federate(strategy, mlp, datasets, rounds=3)
    asked = [report.asked for report in strategy.reports]
    assert asked == ([len(SIZES)] * 3 if room else [])
    assert any("epsilon" in text for text in caplog.messages) != room
    assert np.array_equal(run.state["0.weight"], run.history[0]["0.weight"]) != room


# Lost clients.

LOST: dict[str, tuple[dict[int, str], Collection[int]]] = {
    "nobody": ({}, ()),
    "one before its keys": ({1: "keys"}, {1}),
    "one before its shares": ({1: "shares"}, {1}),
    "one before its model": ({1: "train"}, {1}),
    "one before it reveals": ({1: "reveal"}, ()),
    "two, at two stages": ({1: "keys", 3: "train"}, {1, 3}),
    "two before their models": ({0: "train", 4: "train"}, {0, 4}),
    "two, of which one has sent its model": ({0: "shares", 4: "reveal"}, {0}),
}


@pytest.fixture
def five(points) -> list[Any]:
    return [points(size, client) for client, size in enumerate((*SIZES, 6))]


@pytest.mark.parametrize("case", thinned(LOST, 2))
def test_a_round_equals_the_plain_one_without_the_lost_clients(
    case: str, federate, five, mlp
) -> None:
    lost, without = LOST[case]
    made = masked(FedAvg(fraction_evaluate=0.0), masked_threshold=0.51)
    ours = federate(made, mlp, five, rounds=1, wrap=losing(lost))
    plain = federate(
        FedAvg(fraction_evaluate=0.0), mlp, five, rounds=1, hide={1: without}
    )
    assert 0 < furthest(ours.state, plain.state) < 1e-11
    assert made.reports[0].participants == [i for i in range(5) if i not in without]
    assert len(made.reports[0].rejected) == len(without)
    for partition in without:
        assert "power cut" in ours.reason(partition)


TOO_FEW = {
    "keys": "2 of 5 clients are left, too few for the masks of the round",
    "shares": "2 of 5 clients are left, too few for the masks of the round",
    "train": "2 of the clients answered, fewer than the required 3: nothing",
    "reveal": "2 of the shares for node",
}


@pytest.mark.parametrize("stage", TOO_FEW)
def test_below_the_threshold_nothing_is_revealed(
    stage: str, federate, five, mlp, same_bits
) -> None:
    made = masked(FedAvg(fraction_evaluate=0.0), masked_threshold=0.51)
    ours = federate(
        made, mlp, five, rounds=2, wrap=losing(dict.fromkeys((0, 2, 4), stage))
    )
    same_bits(ours.history[1], ours.history[0])
    assert made.reports[0].kept_previous
    assert any(TOO_FEW[stage] in why for why in made.reports[0].rejected.values())
    asked = [
        config["fedbn-flwr.mask-stage"]
        for config in ours.grid.config("query")
        if "fedbn-flwr.mask-stage" in config
    ]
    assert asked.count("reveal") == (10 if stage == "reveal" else 5), "only in round 2"
    assert made.reports[1].participants == [0, 1, 2, 3, 4]
    assert furthest(ours.history[2], ours.history[1]) > 0


@pytest.mark.parametrize("transport", fast(TRANSPORTS, "barrier", "channel"))
def test_a_client_lost_in_a_step_ends_the_round(
    transport: str, run_step, branches, same_bits
) -> None:
    """A repeated exchange without the client would reveal its values."""

    class Cut(TorchClient):
        def fit(self, parameters, config):
            if self.partition_id == 1 and config["server-round"] == 1:
                self.model.head.register_forward_hook(lambda *_: 1 / 0)
            return super().fit(parameters, config)

    data, made = (
        client_data((3, 6, 6), (7, 5, 6)),
        masked(synchronised(FedTAN, transport)),
    )
    ours = run_step(
        made, branches, data, transport=transport, rounds=2, client=Cut, batch_size=4
    )
    assert ours.seconds < 19, "nobody waited for the timeout of 20 s"
    same_bits(ours.history[1], ours.history[0])
    first, second = made.reports
    assert first.kept_previous
    assert "division by zero" in ours.reason(1)
    assert second.participants == [0, 1, 2]
    attempts = {
        config.get("fedbn-flwr.fedtan-attempt", 0)
        for config in ours.grid.config("query.exchange")
    }
    assert attempts <= {0}, "no client is asked to repeat its step"
    tags = [
        tag
        for m in ours.grid.received
        if m.has_content()
        for tag in m.content.array_records.get("fedtan", ())
    ]
    assert transport != "messages" or tags.count("mean/0/a") == 6, (
        "3 clients in 2 rounds, none of them again"
    )


@pytest.mark.parametrize("sizes", [(5, 6, 7), (5, 30, 30)])
def test_after_a_client_was_lost_in_a_step_none_repeats_its_batch(
    federate, points, mlp, sizes, caplog
) -> None:
    """The exchanges before the loss are public.

    Repeating a batch without the lost client would reveal its values as the difference.
    """

    class Cut(TorchClient):
        def fit(self, parameters, config):
            if self.partition_id == 1 and config["server-round"] == 1:
                list(self.model.modules())[-1].register_forward_hook(lambda *_: 1 / 0)
            return super().fit(parameters, config)

    data = [points(size, number) for number, size in enumerate(sizes)]
    made = masked(FedTAN(fraction_evaluate=0.0))
    options = {"rounds": 2, "batch_size": 16, "barrier": True, "client": Cut}
    if sizes == (5, 30, 30):
        federate(made, mlp, data, **options)
        assert [report.participants for report in made.reports] == [[], [1, 2]]
        assert (
            "its batch contains all of its data, so it would send the same numbers"
            in caplog.text
        )
        return
    with pytest.raises(
        ConfigError, match=r"no client can take part, .* For each of the 3 clients"
    ):
        federate(made, mlp, data, **options)


def test_a_round_that_ends_before_a_sum_leaves_nobody_out(
    federate, points, mlp
) -> None:
    data = [points(size, number) for number, size in enumerate((5, 6, 7))]
    made = masked(FedAvg(fraction_evaluate=0.0), masked_threshold=1.0)
    federate(made, mlp, data, rounds=2, batch_size=16, wrap=losing({2: "train"}))
    assert [report.kept_previous for report in made.reports] == [True, False]
    assert made.reports[1].participants == [0, 1, 2]


def test_a_client_lost_after_a_synchronised_step_ends_the_round(
    federate, datasets, mlp
) -> None:
    """A later sum of the other clients would reveal the lost client's gradients.

    With one step, the exchanges reveal the sums of all gradients of gamma and beta, and
    an update without the lost client reveals the sums of the other clients.
    """
    made, threads = masked(FedTAN(fraction_evaluate=0.0)), {"threads": len(datasets)}
    options: dict[str, Any] = {
        "local_steps": 1,
        "barrier": True,
        "timeout": 30,
        "grid_options": threads,
    }
    run = federate(made, mlp, datasets, rounds=2, wrap=losing({2: "train"}), **options)
    assert [report.kept_previous for report in made.reports] == [True, False]
    assert any(
        "lost after the synchronised step" in why
        for why in made.reports[0].rejected.values()
    )
    revealed = [
        c["server-round"]
        for c in run.grid.config("query")
        if c.get("fedbn-flwr.mask-stage") == "reveal"
    ]
    assert set(revealed) == {2}


def test_a_client_that_spoils_the_sum_ends_the_round_and_not_the_run(
    federate, datasets, mlp, same_bits
) -> None:
    """BN is frozen, and an unidentified client changes its statistics.

    The previous model is kept.
    """

    class Moves(TorchClient):
        def fit(self, parameters, config):
            arrays, count, metrics = super().fit(parameters, config)
            if self.partition_id == 1 and config["server-round"] == 2:
                arrays[4] = arrays[4] + 1
            return arrays, count, metrics

    made = masked(FixBN(freeze_at=1, fraction_evaluate=0.0))
    ours = federate(made, mlp, datasets, rounds=3, client=Moves)
    assert list(ours.state)[4] == "1.running_mean"
    assert [report.kept_previous for report in made.reports] == [False, True, False]
    assert any(
        "nothing is revealed" in why for why in made.reports[1].rejected.values()
    )
    same_bits(ours.history[2], ours.history[1])


def round_of_masks(**told: Any) -> tuple[Context, ConfigRecord]:
    """Return the context and training config of one of three clients."""
    party, context = Party.new(1), Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    others = [Party.new(1) for _ in range(2)]
    keys = {
        number: PublicKeys(*own.publics) for number, own in enumerate([party, *others])
    }
    party.shares(0, keys, 2)
    context.state["fedbn-flwr.masks"] = ConfigRecord({"secrets": party.dump()})
    of_masks = {"present": [1, 2], "weight": 4.0, "total-weight": 12.0} | told
    config = ConfigRecord({"server-round": 1})
    config.update({f"fedbn-flwr.mask-{name}": of_masks[name] for name in of_masks})
    return context, config


@pytest.mark.parametrize(
    ("equal", "clips", "weight", "trains"),
    [
        (False, False, 4.0, True),
        (True, True, 1.0, True),
        (True, False, 1.0, False),
        (False, True, 1.0, False),
        (True, True, 4.0, False),
    ],
)
def test_weights_that_would_tell_of_a_client_are_refused_before_it_trains(
    equal: bool, clips: bool, weight: float, trains: bool, mlp
) -> None:
    """Equal weights are allowed only under ``dp=client``, with weight 1 each."""
    told = {"equal-weights": equal, "weight": weight}
    context, config = round_of_masks(**told)
    if clips:
        config[CLIP] = 0.5
    state = to_record(to_state(mlp().state_dict()))
    trained: list[Message] = []

    def train(message: Message, context: Context) -> Message:
        trained.append(message)
        return Message(Error(0), reply_to=message)

    message = Message(RecordDict({"arrays": state, "config": config}), 1, "train")
    with nullcontext() if trains else pytest.raises(MaskingError):
        masked_update(message, context, train)
    assert bool(trained) is trains


def test_masks_of_an_earlier_round_serve_no_later_one(mlp) -> None:
    context, config = round_of_masks(**{"equal-weights": False})
    config["server-round"] = int(config["server-round"]) + 1
    state = to_record(to_state(mlp().state_dict()))
    message = Message(RecordDict({"arrays": state, "config": config}), 1, "train")
    trained: list[Message] = []

    def train(message: Message, context: Context) -> Message:
        trained.append(message)
        return message

    with pytest.raises(MaskingError):
        masked_update(message, context, train)
    assert not trained


def test_a_step_that_fails_after_an_exchange_is_not_repeated(mlp) -> None:
    context, config = round_of_masks(**{"equal-weights": False})
    state = to_record(to_state(mlp().state_dict()))
    sent: list[torch.Tensor] = []

    class Leaves:
        def begin(self) -> int:
            return 0

        def reduce(self, tag: str, tensor: torch.Tensor) -> torch.Tensor:
            sent.append(tensor)
            raise RuntimeError("the channel is closed")

        def close(self) -> None:
            pass

    def training(value: float) -> Callable[[Message, Context], Message]:
        def call(message: Message, context: Context) -> Message:
            wrapped(Leaves(), required=True).reduce("mean/0", torch.full((2,), value))
            return message

        return call

    def ask(value: float) -> None:
        masked_update(
            Message(RecordDict({"arrays": state, "config": config}), 1, "train"),
            context,
            training(value),
        )

    with pytest.raises(RuntimeError, match="the channel is closed"):
        ask(1.0)
    with pytest.raises(MaskingError, match="exchange 'mean/0' was asked for twice"):
        ask(2.0)
    assert len(sent) == 1


def test_a_resumed_run_has_other_batches(federate, datasets, mlp) -> None:
    """If the batches repeated, two sums would differ by a lost client's update."""

    def second_round(make: Callable[[], Any]) -> State:
        first, resumed = make(), make()
        federate(first, mlp, datasets, rounds=1, batch_size=2)
        resumed.load_state_dict(first.state_dict(), 1)
        return federate(resumed, mlp, datasets, rounds=2, batch_size=2).state

    for make, repeats in ((FedAvg, True), (lambda: masked(FedAvg()), False)):
        assert (furthest(second_round(make), second_round(make)) == 0) == repeats


def test_a_resumed_run_leaves_out_clients_that_have_one_batch_alone(
    federate, points, mlp
) -> None:
    data = [points(size, number) for number, size in enumerate((5, 30, 30))]
    first, resumed = (
        masked(FedAvg(fraction_evaluate=0.0)),
        masked(FedAvg(fraction_evaluate=0.0)),
    )
    federate(first, mlp, data, rounds=1, batch_size=16)
    resumed.load_state_dict(first.state_dict(), 1)
    federate(resumed, mlp, data, rounds=3, batch_size=16)
    assert [report.participants for report in resumed.reports] == [[1, 2], [0, 1, 2]]


def out_of_range_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, calls = FixedPoint.mean, itertools.count()

    def first_out_of_range(self: FixedPoint, *values: Any) -> Any:
        if next(calls) == 0:
            raise ReplyError("the sum is out of range")
        return mean(self, *values)

    monkeypatch.setattr(FixedPoint, "mean", first_out_of_range)


@pytest.mark.parametrize("why", ["out of range", "shares come late"])
def test_a_sum_that_is_of_no_use_may_be_known(
    why: str, federate, points, mlp, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [points(size, number) for number, size in enumerate((5, 30, 30))]
    made = masked(FedAvg(fraction_evaluate=0.0))
    late = {0: "reveal", 1: "reveal"} if why == "shares come late" else {}
    if not late:
        out_of_range_at_first(monkeypatch)
    federate(made, mlp, data, rounds=3, batch_size=16, wrap=losing(late))
    assert [report.kept_previous for report in made.reports] == [True, False, False]
    assert [report.participants for report in made.reports][1:] == [[1, 2], [0, 1, 2]]


# The server's view.


def forms_of(state: State, weight: float, point: FixedPoint) -> Iterator[bytes]:
    """Yield a client's numbers as bytes in both float types and in fixed point."""
    for name, array in state.items():
        if array.dtype.kind == "f" and array.size > 3 and array.any():
            yield from (
                array.astype(kind).tobytes() for kind in (np.float32, np.float64)
            )
            yield point.vector({name: array}, weight).tobytes()


def test_no_message_holds_a_clients_numbers(run_step, branches, monkeypatch) -> None:
    """No message contains a model or exchange in any of its forms.

    The same search finds the numbers of a plain run.
    """
    seen: list[tuple[float, State]] = []
    weight = 0.0

    class Spied(TorchClient):
        def _fit(self, cached, parameters, config):
            nonlocal weight
            weight = float(len(self.data.train))
            before = {
                name: value.clone().numpy() for name, value in cached.state.items()
            }
            found = super()._fit(cached, parameters, config)
            for name, value in cached.state.items():
                now = value.clone().numpy()
                seen.append(
                    (weight, {name: now, f"update of {name}": now - before[name]})
                )
            return found

    exchange = SynchronisedStep.exchange

    def spied(step: SynchronisedStep, tag: str, local: torch.Tensor) -> torch.Tensor:
        seen.append((weight, {tag: local.clone().numpy()}))
        return exchange(step, tag, local)

    monkeypatch.setattr(SynchronisedStep, "exchange", spied)
    data, found = client_data((3, 6, 6), (2, 5, 1)), []
    for kind in (lambda s: s, masked):
        seen.clear()
        run = run_step(
            kind(synchronised(FedTAN, "messages")),
            branches,
            data,
            transport="messages",
            client=Spied,
        )
        received = b""
        for message in run.grid.received:
            if message.has_content():
                for record in message.content.array_records.values():
                    received += b"".join(array.data for array in record.values())
        forms: set[bytes] = set()
        for weight, state in seen:
            forms.update(forms_of(state, weight, FixedPoint(8.0)))
        found.append(sum(form in received for form in forms))
    assert found[0] > 50
    assert found[1] == 0


def test_a_reply_holds_no_metrics(federate, datasets, mlp) -> None:
    run = federate(masked(FedAvg()), mlp, datasets, rounds=1)
    replies = [m for m in run.grid.received if m.metadata.message_type == "train"]
    assert all(list(m.content["metrics"]) == ["num-examples"] for m in replies)
    assert all(list(m.content["arrays"]) == ["fedbn-flwr.masked"] for m in replies)
    assert not run.strategy.reports[0].clients
    assert "evaluate" not in {m.metadata.message_type for m in run.grid.sent}


def test_layers_that_need_the_number_of_batches_are_refused_before_training(
    federate, datasets, mlp
) -> None:
    def cumulative() -> nn.Module:
        model = mlp()
        model[1].momentum = None
        return model

    strategy = masked(FedAvg())
    with pytest.raises(ConfigError, match="layer '1' has momentum=None"):
        federate(strategy, cumulative, datasets, rounds=1)
    with pytest.raises(NormLayerError) as error:
        refuse_cumulative(cumulative(), "masked-sums=true")
    assert error.value.code == CUMULATIVE
    # A layer without running statistics needs no number of batches.
    refuse_cumulative(
        nn.BatchNorm1d(3, momentum=None, track_running_stats=False), "masked-sums=true"
    )


def test_a_client_weighs_its_numbers_by_its_own_count(
    federate, datasets, mlp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server could isolate a client's update by a large weight."""
    weight = MaskedRound.weight
    monkeypatch.setattr(
        MaskedRound,
        "weight",
        lambda self, them: 1e6 if set(them) == {1} else weight(self, them),
    )
    strategy = masked(FedAvg(fraction_evaluate=0.0), masked_threshold=0.51)
    run = federate(strategy, mlp, datasets, rounds=1)
    assert (
        "the server gives this client the weight 1e+06, but it has trained on [5]"
        " examples" in run.reason(1)
    )
    assert strategy.reports[0].participants == [0, 2, 3]


# Refusals.


class MedianMethod(Method):
    name = "median"

    def aggregate(self, state, facts, replies, model):
        return dict(replies[0].state), state


class Median(Strategy):
    method = MedianMethod


class MeanMethod(Method):
    """A method that reads only a mean of an extra record."""

    name = "mean-of-a-record"
    read = "mean"

    def travels(self, num_rounds=None):
        return (Travels(extras=(Extra(BESIDE, "trainable", "", read=self.read),)),)


class Mean(Strategy):
    method = MeanMethod


class Logged(Strategy):
    """A strategy that only reports the record."""

    method = type(
        "LoggedMethod", (MeanMethod,), {"name": "record-in-the-log", "read": "log"}
    )


BESIDE = Key("tests.beside", "ArrayRecord: a record of the test", "client", "server")
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "2L+1": (
        lambda: FedTAN(fedtan_exchanges="2L+1"),
        "with fedtan-exchanges=2L.1 the server computes more than sums",
    ),
    "variates": (Scaffold, "the changes of the control variates come with the model"),
    "losses": (FedBS, "the clients' losses are the weights"),
    "re-estimation": (
        StaticBN,
        "collects statistics that are re-estimated on the clients' data",
    ),
    "recalibrate": (
        lambda: FedAvg(recalibrate=True),
        "collects statistics that are re-estimated",
    ),
    "recalibrated tests": (
        lambda: FedAvg(eval_on="recalibrated"),
        "collects statistics that are re-estimated",
    ),
    "SGD's buffers": (
        lambda: FedAvg(momentum_scope="global"),
        "'momentum' in the reply",
    ),
    "pooled": (
        lambda: FedAvg(variance="pooled"),
        "variance=pooled reads the statistics of single replies",
    ),
    "drift": (
        lambda: FixBN(freeze_at="auto", freeze_window=2),
        "freeze-at=auto follows delta_m of each client",
    ),
    "shared BN": (
        lambda: FedBN(eval_on="averaged-bn"),
        "eval-on=averaged-bn collects the BN parts",
    ),
    "a method of one's own": (
        lambda: Median(),
        r"MedianMethod\.aggregate may read anything in single replies",
    ),
    "a record of which a mean is read": (
        Mean,
        "mean-of-a-record.*'tests.beside' in the reply",
    ),
    "a record for the log": (Logged, "record-in-the-log.*'tests.beside' in the reply"),
}


@pytest.mark.parametrize("name", thinned(STRATEGIES))
def test_the_guides_table_says_what_a_round_of_each_method_does(
    name: str, federate, datasets, mlp, wsconv_net, run_step, branches
) -> None:
    # One client has data for only one step.
    own = {"head_steps": 0} if name == "fedrep" else {}
    strategy = masked(STRATEGIES[name](fraction_evaluate=0.0, **own))
    if [*uncovered(strategy.methods, "masked-sums", "true")]:
        with pytest.raises(ConfigError) as caught:
            federate(strategy, mlp, datasets)
        assert {problem.key for problem in caught.value.problems} == {"masked_sums"}
    elif strategy.methods.whole.exchanges:
        run_step(
            masked(synchronised(STRATEGIES[name])),
            branches,
            client_data((3, 6, 6), (2, 5, 1)),
        )
    else:
        federate(strategy, wsconv_net if name == "fedwon" else mlp, datasets, rounds=1)
        assert strategy.reports[0].participants == [0, 1, 2, 3]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_sum_is_refused_by_name(case: str, federate, datasets, mlp) -> None:
    make, message = REFUSED[case]
    strategy = masked(make())
    with pytest.raises(ConfigError, match=message):
        federate(strategy, mlp, datasets)
    assert not strategy.reports, "before round 1"


def test_an_app_without_the_mod_ends_the_run(federate, datasets, mlp) -> None:
    def without_mod(client_fn: Any) -> ClientApp:
        inner, app = client_app(client_fn), ClientApp()
        app.query()(lambda message, context: inner(_without(message), context))
        app.train()(lambda message, context: inner(message, context))
        return app

    with pytest.raises(
        ReplyError, match=r"Make `masked_update` of fedbn_flwr.mods the app's first mod"
    ):
        federate(masked(FedAvg()), mlp, datasets, wrap=without_mod)


def _without(message: Message) -> Message:
    for key in list(message.content.config_records):
        del message.content[key]
    return message


def test_a_client_whose_count_is_not_known_takes_no_part(
    federate, datasets, mlp
) -> None:
    class Silent(TorchClient):
        def get_properties(self, config):
            found = super().get_properties(config)
            return {"partition-id": 1} if self.partition_id == 1 else found

    run = federate(masked(FedAvg()), mlp, datasets, rounds=1, client=Silent)
    assert run.strategy.reports[0].participants == [0, 2, 3]
    assert "masked-sums=true weights the clients by examples" in run.reason(1)

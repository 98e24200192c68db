"""Laws of training and sending a part of a model.

``tests/reference`` compares such runs with loops in plain torch. Here a run equals the
full exchange, in which the clients freeze the model themselves and everything travels.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from flwr.app import (
    ArrayRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torchvision.ops import FrozenBatchNorm2d

from fedbn_flwr import InProcessGrid, split_state, to_legacy, train_only
from fedbn_flwr.batchnorm.train_only import fixed_by, freeze
from fedbn_flwr.client import fixed as fixed_at_client
from fedbn_flwr.errors import ClientPartError, ConfigError, NormLayerError
from fedbn_flwr.messages.records import to_record, to_state
from fedbn_flwr.mods import bn_mod, bn_rules
from fedbn_flwr.privacy import DPWrapper
from fedbn_flwr.strategies import STRATEGIES, FedAvg, FedBN, FedTAN, FixBN, Scaffold
from fedbn_flwr.training.borrowed import borrowed
from fedbn_flwr.training.freezing import stays_in_eval
from fedbn_flwr.training.run_memory import kept_for_run
from tests.support.bad_replies import lose_replies
from tests.support.fast import fast
from tests.support.many_layers import SETTINGS as OF_METHODS
from tests.support.many_layers import two_layers

SIZES = (6, 13, 9)
METHODS = [name for name in STRATEGIES if name != "fedwon"]
WORDS = ("1,4,6", "4,6", "*.weight")
SETTINGS = {**OF_METHODS, "fedrep": {"personal": "6.weight"}}
LATE = {1: {2}}
"""The third client joins in round 2."""


def single() -> nn.Module:
    """Return the model in float32. The full exchange moves no fixed value there."""
    return two_layers().float()


def forget() -> None:
    """Let the clients of this process lose the fixed entries."""
    kept_for_run("fixed", dict).clear()


def made(name: str, **more: Any) -> FedAvg:
    return STRATEGIES[name](**SETTINGS.get(name, {}), min_available_nodes=1, **more)


def full_exchange(name: str, words: str, federate, datasets, **how: Any) -> Any:
    """Return a run whose clients freeze the model themselves."""

    def frozen() -> nn.Module:
        model = single()
        train_only(model, words)
        return model

    strategy = made(name, parts=split_state(single()))
    return federate(strategy, frozen, datasets, rounds=3, **how)


EVENTS = ("", "each round", "late")
CASES = [*itertools.product(METHODS, WORDS, EVENTS)]
SQUARE = [
    (name, WORDS[i], EVENTS[(i + k) % 3])
    for k, name in enumerate(("fedbn", "scaffold", "fedtan"))
    for i in range(3)
]


@pytest.mark.parametrize(("name", "words", "lost"), fast(CASES, *SQUARE))
def test_the_model_has_the_bits_of_the_full_exchange(
    name: str, words: str, lost: str, federate, datasets, same_bits
) -> None:
    """Clients may lose their entries, also before a test, and a client may join late."""
    how = {"hide": LATE if lost == "late" else {}}
    strategy = made(name, train_only=words)
    if lost == "each round":
        strategy.on_round_end = lambda *_: forget()
        strategy.train_metrics_aggr_fn = lambda *_: forget() or MetricRecord()
    run = federate(strategy, single, datasets, rounds=3, **how)
    right = full_exchange(name, words, federate, datasets, **how)
    same_bits(run.state, right.state)
    for one, other in zip(strategy.reports, right.reports, strict=True):
        assert one.evaluations == other.evaluations
        assert not one.rejected
        assert one.train.up < other.train.up or name == "standalone"
        resent = lost or one.server_round == 1 or name == "standalone"
        assert one.train.down < other.train.down or resent


def test_a_node_that_does_not_say_what_it_has_gets_the_whole_model(
    federate, datasets, monkeypatch
) -> None:
    """In FedTAN's step, no message could be sent again."""
    down = []
    for lost in ({}, {2: 1}):
        lose_replies(monkeypatch, lost, kind=MessageType.QUERY)
        run = federate(FedTAN(train_only=WORDS[0]), single, datasets, rounds=2)
        down.append(run.strategy.reports[1].train.down)
    assert down[1] == down[0] + floats(run.state, run.state)


def floats(state: Mapping[str, Any], names: Any) -> int:
    return sum(state[name].nbytes for name in names if state[name].dtype.kind == "f")


@pytest.mark.parametrize("words", WORDS)
def test_after_the_first_round_only_the_rest_travels(
    words: str, federate, datasets
) -> None:
    """A resend is in the ledger."""
    strategy = FedAvg(train_only=words)
    strategy.on_round_end = lambda number, *_: number == 2 and forget()
    run = federate(strategy, single, datasets, rounds=3)
    fixed = fixed_by(split_state(single()), words)
    whole = floats(run.state, run.state)
    rest = floats(run.state, run.state.keys() - fixed)
    assert [one.train.up for one in strategy.reports] == [3 * rest] * 3
    assert [one.train.down for one in strategy.reports] == [whole, rest, rest + whole]
    assert [one.evaluate.down for one in strategy.reports] == [rest] * 3


@pytest.mark.parametrize(
    ("name", "words", "needed"),
    [
        ("mobilenet_v2", "norms,head", 324_136),
        ("resnet18", "norms,head", 97_320),
        ("mobilenet_v2", "head", 51_240),
    ],
)
def test_bytes_of_known_networks(name: str, words: str, needed: int) -> None:
    import torchvision

    model = torchvision.models.get_model(name, num_classes=10)
    state = to_state(model.state_dict())
    for source in (model, state):
        fixed = fixed_by(split_state(source), words, state)
        assert floats(state, state.keys() - fixed) == needed


# --- the words ------------------------------------------------------------------------


class Zoo(nn.Module):
    """A network with a layer of each kind of normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 1),
            nn.BatchNorm2d(4),
            nn.GroupNorm(2, 4),
            nn.Conv2d(4, 4, 1, bias=False),
            nn.LayerNorm([4, 2, 2]),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            nn.BatchNorm2d(4, affine=False),
            nn.BatchNorm2d(4, track_running_stats=False),
        )
        self.tied = self.body[0]
        self.head = nn.Linear(16, 2)


NORM = (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm2d)


def meanings(path: str, module: Any, leaf: str) -> dict[str, bool]:
    """Return whether each word selects a parameter."""
    norm, batchnorm = isinstance(module, NORM), isinstance(module, nn.BatchNorm2d)
    return {
        "norms": norm,
        "head": path == "head",
        "biases": leaf == "bias" and not norm,
        "type:BatchNorm2d": batchnorm,
        "type:Conv2d": isinstance(module, nn.Conv2d),
        "body.1": path == "body.1",
        "body.[45]": path in ("body.4", "body.5"),
        "*.weight": leaf == "weight",
        "tied": path in ("tied", "body.0"),
    }


@pytest.mark.parametrize(
    ("first", "second"),
    itertools.combinations_with_replacement(meanings("", None, ""), 2),
)
def test_words_select_by_their_meaning(first: str, second: str) -> None:
    """A shared tensor trains under both names, and each word adds to the others."""
    model = Zoo()
    train_only(model, [first, second])
    for path, module in model.train().named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False))
        selects = []
        for leaf in own:
            selected = meanings(path, module, leaf)
            selects.append(selected[first] or selected[second])
        assert [one.requires_grad for one in own.values()] == selects, path
        if isinstance(module, nn.BatchNorm2d) and own:
            assert module.training == any(selects), path


@pytest.mark.parametrize(
    "words", ["nothing", "body.9", "type:Linea", "type:ReLU", "relu", "norm", "norms"]
)
def test_a_word_without_a_parameter_names_another_one(words: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()) if words == "norms" else Zoo()
    with pytest.raises(ConfigError, match="names no parameter of the model") as raised:
        train_only(model, words)
    assert str(raised.value).count(f"'{words}'") == 1


@pytest.mark.parametrize("layers", [("fc1", "fc2", "fc3"), ("body", "heads.head")])
@pytest.mark.parametrize("wrap", [lambda layer: layer, weight_norm])
def test_without_a_known_head_the_last_layer_is_named_and_works(layers, wrap) -> None:
    model = nn.Module()
    for path in layers:
        above, _, leaf = path.rpartition(".")
        if above:
            model.add_module(above, nn.Module())
        model.get_submodule(above).add_module(leaf, wrap(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="'head' needs") as raised:
        train_only(model, "head")
    assert f"'{layers[-1]}'" in str(raised.value)
    with pytest.raises(ConfigError, match=f"'{layers[-1]}', the last"):
        split_state(model, personal="last-layer")
    train_only(model, layers[-1])
    split_state(model, personal=layers[-1])


@pytest.mark.parametrize("by_names", [True, False])
@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.BatchNorm1d, nn.SyncBatchNorm])
def test_statistics_of_any_kind_stay_without_a_selected_entry(kind, by_names) -> None:
    """Otherwise, a split by types and a split by names would differ."""
    norm = kind(2, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Linear(2, 2), norm, nn.Linear(2, 2))
    state = to_state(model.state_dict())
    parts = split_state(state if by_names else model)
    assert fixed_by(parts, "2", state) == {*state} - {"2.weight", "2.bias"}
    assert "1.running_mean" not in fixed_by(parts, "1.bias,2", state)


@pytest.mark.parametrize("words", ["norms", "biases", "type:BatchNorm2d"])
def test_a_server_that_has_only_names_asks_for_the_types(
    words: str, federate, datasets
) -> None:
    def grouped() -> nn.Module:
        model = single()
        model[1] = nn.GroupNorm(2, 4)
        return model

    parts = split_state(grouped().state_dict())
    strategy = FedAvg(train_only=f"{words},6", parts=parts)
    with pytest.raises(ConfigError, match=r"parts=split_state\(model\)"):
        federate(strategy, grouped, datasets, rounds=1)


OWN = ("scale", "index")


def test_an_entry_that_may_be_a_parameter_is_selected_or_needs_the_types() -> None:
    """Integers and running statistics are never parameters."""
    model = nn.Sequential(nn.Linear(2, 2), FrozenBatchNorm2d(2), nn.Linear(2, 2))
    model.scale = nn.Parameter(torch.ones(2))
    model.register_buffer("index", torch.arange(2))
    state = to_state(model.state_dict())
    parts = split_state(state)
    assert fixed_by(parts, "2,scale", state) == {*state} - {"2.weight", "2.bias", *OWN}
    for split in (parts, parts.with_personal("scale")):
        with pytest.raises(ConfigError, match=r"'scale' may be .* parts=split_state"):
            fixed_by(split, "2", state)


@pytest.mark.parametrize("words", ["0", "1"])
def test_a_tied_weight_trains_under_both_names_or_needs_the_types(
    words: str, federate, datasets
) -> None:
    def tied() -> nn.Module:
        layers = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        layers[1].weight = layers[0].weight
        return nn.Sequential(*layers)

    by_names, by_types = split_state(tied().state_dict()), split_state(tied())
    with pytest.raises(ConfigError, match=r"under another name.*parts=split_state"):
        federate(FedAvg(train_only=words, parts=by_names), tied, datasets)
    run = federate(FedAvg(train_only=words, parts=by_types), tied, datasets)
    changed = {n for n in run.state if (run.state[n] != run.history[0][n]).any()}
    assert changed == {"0.weight", "1.weight", f"{words}.bias"}


# --- who is refused, and who is not ---------------------------------------------------


def test_a_method_for_batchnorm_needs_a_layer_that_trains(federate, datasets) -> None:
    for kind in (FedBN, FixBN):
        with pytest.raises(NormLayerError, match="train_only=6 freezes all of them"):
            federate(kind(train_only="6"), single, datasets)


def test_a_personal_entry_must_train(federate, datasets) -> None:
    strategy = FedAvg(train_only="1", personal="6")
    with pytest.raises(ConfigError, match=r"personal names '6\.weight'"):
        federate(strategy, single, datasets)


def test_the_legacy_loop_and_flowers_wrapper_are_refused(datasets) -> None:
    arrays = to_record(single().state_dict())
    with pytest.raises(ConfigError, match="train_only sends the other entries once"):
        to_legacy(FedAvg(train_only="6"), arrays)
    wrapper = DifferentialPrivacyServerSideFixedClipping(untested(), 0.1, 1.0, 2)
    with pytest.raises(
        ConfigError, match="train_only sends only the entries that train"
    ):
        started(wrapper, own_app(datasets))


# --- apps of users --------------------------------------------------------------------


def untested(kind: type[FedAvg] = FedAvg) -> FedAvg:
    """Return a strategy whose clients train a part and do not test."""
    return kind(train_only=WORDS[0], fraction_evaluate=0.0)


def everything(model: nn.Module) -> Iterable[nn.Parameter]:
    return model.parameters()


def own_app(
    datasets: Sequence[Any],
    replies: str = "whole",
    rules: bool = True,
    mods: Any = (bn_mod,),
    of: Callable[[nn.Module], Iterable[nn.Parameter]] = everything,
) -> ClientApp:
    """Return an app with its own loop, that replies with all or with some entries.

    ``of`` prepares a model and returns the parameters of the optimizer.
    """
    app = ClientApp(mods=[*mods])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        data = datasets[int(context.node_config["partition-id"])]
        model = single()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        with bn_rules(model, msg if rules else {}, context) as rule:
            sgd = rule.wrap(torch.optim.SGD([*of(model)], lr=0.1, weight_decay=0.1))
            model.train()
            with rule.step(len(data)):
                outputs = model(data.inputs.float())
                F.cross_entropy(outputs, data.targets).backward()
            sgd.step()
        if of is everything:
            assert all(p.requires_grad for p in model.parameters()), "the loop's again"
        state = ArrayRecord(model.state_dict())
        if replies == "part":
            for name in fixed_by(split_state(model), WORDS[0]):
                del state[name]
        count = MetricRecord({"num-examples": len(data)})
        content = RecordDict({"arrays": state, "metrics": count})
        return Message(content, reply_to=msg)

    return app


def started(strategy: Any, app: ClientApp) -> ArrayRecord:
    """Return the model after three rounds."""
    start = to_record(single().state_dict())
    with InProcessGrid(app, len(SIZES)) as grid:
        return strategy.start(grid, start, num_rounds=3).arrays


@pytest.mark.parametrize("kind", [FedAvg, FedBN, Scaffold, FixBN])
def test_a_loop_of_ones_own_may_reply_with_a_part(kind, datasets, monkeypatch) -> None:
    """The app sees whole models in each round, and needs no line for the part.

    The last run is as on a network: each message may find a new process.
    """
    states = []
    for replies in ("whole", "part", "network"):
        is_node = functools.partial(bool, replies == "network")
        monkeypatch.setattr(fixed_at_client, "on_network_node", is_node)
        strategy = untested(kind)
        states.append(started(strategy, own_app(datasets, replies)))
        down = [one.train.down for one in strategy.reports]
        assert down[1] == down[2] < down[0]
    assert states[0] == states[1] == states[2]


def test_an_app_without_the_mod_is_told_once_that_all_travels(datasets, caplog) -> None:
    told, states = [], []
    caplog.set_level(logging.INFO, logger="flwr")
    for mods in ([], [bn_mod]):
        caplog.clear()
        strategy = untested()
        states.append(started(strategy, own_app(datasets, mods=mods)))
        told.append(caplog.text.count("they travel in each round"))
        first, *later = [one.train.down for one in strategy.reports]
        assert [one < first for one in later] == [bool(mods)] * 2
        sizes = f"({first - later[0]} bytes) do not change and travel once"
        assert (sizes in caplog.text) == bool(mods)
    assert told == [1, 0]
    assert states[0] == states[1]


def test_a_loop_that_trains_all_is_refused_by_name(datasets) -> None:
    app = own_app(datasets, rules=False)
    with pytest.raises(ClientPartError, match=r"'0\.\w+' changed, but train_only"):
        started(untested(), app)


def test_an_own_aggregation_sees_whole_models_and_flowers_loop_resends(
    datasets,
) -> None:
    seen = []

    class Own(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            seen.extend(len(reply.content["arrays"]) for reply in replies)
            return super().aggregate_train(server_round, replies)

    class InFlowersLoop(FedAvg):
        start = FlowerFedAvg.start

    results = []
    for kind in (FedAvg, Own, InFlowersLoop):
        strategy = untested(kind)
        if kind is InFlowersLoop:
            strategy.train_metrics_aggr_fn = lambda *_: forget() or MetricRecord()
        results.append(started(strategy, own_app(datasets)))
        assert not any(one.rejected for one in strategy.reports)
    assert set(seen) == {len(single().state_dict())}
    assert results[0] == results[1] == results[2]


def with_frozen_body(model: nn.Module) -> Iterable[nn.Parameter]:
    model[:6].requires_grad_(False)
    return model[6].parameters()


def average_of_weights(model: nn.Module) -> Iterable[nn.Parameter]:
    """The body follows the head without a gradient, as a momentum encoder does."""
    for parameter in [*model[:6].requires_grad_(False).parameters()]:
        parameter.data = parameter.data * 0.9
    return model[6].parameters()


def by_a_loop(model: nn.Module, batches: Any, rules: Any, learning_rate: float) -> Any:
    optimizer = rules.wrap(torch.optim.SGD(model[6].parameters(), learning_rate))
    for inputs, targets in batches:
        optimizer.zero_grad()
        with rules.step(len(targets)):
            F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return 0.0


@pytest.mark.parametrize("rules", [True, False])
@pytest.mark.parametrize("kind", [FedAvg, FedBN])
@pytest.mark.parametrize(
    ("of", "moves"),
    [
        (lambda model: model[6].parameters(), True),
        (with_frozen_body, True),
        (average_of_weights, False),
        (everything, False),
    ],
)
def test_statistics_that_move_without_their_layer_are_named_by_what_happens(
    of, moves, kind, rules, datasets, caplog
) -> None:
    """The words of the warning are not refused, and then nothing moves."""
    app = own_app(datasets, of=of, rules=rules)
    strategy = kind(min_available_nodes=1, fraction_evaluate=0.0)
    started(strategy, app)
    told = [text for text in caplog.messages if "of 2 BatchNorm layer(s)" in text]
    assert len(told) == moves
    if moves:
        caplog.clear()
        assert "train_only='6' and parts=split_state(model) to FedAvg" in told[0]
        strategy = FedAvg(train_only="6", parts=split_state(single()))
        end = started(strategy, own_app(datasets, of=of))
        assert "BatchNorm layer(s)" not in caplog.text
        before = single().state_dict()
        for name, entry in end.to_torch_state_dict().items():
            assert torch.equal(entry, before[name]) != name.startswith("6."), name


def test_a_loop_of_a_client_and_norms_that_nobody_trains_are_named(
    federate, datasets, caplog
) -> None:
    for words in ("", "1,4,6"):
        caplog.clear()
        strategy = FedAvg(train_only=words, min_available_nodes=1)
        federate(strategy, two_layers, datasets, loop=by_a_loop)
        assert caplog.text.count("train_only='6' and") == 1


@pytest.mark.parametrize("words", ["6", "0,1,3,4,6"])
def test_a_frozen_entry_that_the_loop_sets_itself_has_its_reason(
    words: str, datasets
) -> None:
    """Words that name its module are the remedy."""
    strategy = FedAvg(train_only=words, fraction_evaluate=0.0)
    app = own_app(datasets, of=average_of_weights)
    if words == "6":
        with pytest.raises(ConfigError, match=r"'0\.\w+' .* without an optimizer"):
            started(strategy, app)
    else:
        started(strategy, app)


@pytest.mark.parametrize("kind", [FedAvg, FedBN])
def test_a_start_that_continues_says_that_own_entries_begin_again(
    kind, datasets, caplog
) -> None:
    """A third start with the first arrays is a run of its own without a warning."""
    first = to_record(single().state_dict())
    with InProcessGrid(own_app(datasets), len(SIZES)) as grid:
        arrays, told = first, []
        for words in ("4,6", "1,4,6", "1,4,6"):
            if len(told) == 2:
                arrays = first
            caplog.clear()
            strategy = kind(train_only=words, fraction_evaluate=0.0)
            arrays = strategy.start(grid, arrays, num_rounds=1).arrays
            told.append("begin again with the given arrays" in caplog.text)
    assert told == [False, kind is FedBN, False]


def test_privacy_adds_no_noise_to_fixed_entries(federate, datasets, same_bits) -> None:
    """Without noise and clipping, the result has the average of equal weights."""
    fixed = fixed_by(split_state(single()), WORDS[0])
    for noise in (0.0, 1.0):
        strategy = FedAvg(train_only=WORDS[0])
        DPWrapper(strategy, noise_multiplier=noise, clipping_norm=1e6)
        run = federate(strategy, single, datasets, rounds=2)
        before = run.history[0]
        same_bits(*({name: one[name] for name in fixed} for one in (run.state, before)))
        assert (run.state["6.bias"] != before["6.bias"]).any()


def test_a_borrowed_model_is_frozen_for_the_block() -> None:
    model = single()
    with borrowed(model):
        freeze(model, split_state(model).names)
        assert len(stays_in_eval(model)) == 2
        assert not any(one.requires_grad for one in model.parameters())
    assert not stays_in_eval(model)
    assert all(one.requires_grad for one in model.parameters())

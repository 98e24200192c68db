"""``layers``: a method acts on a part of the BatchNorm layers, the others are FedAvg's.

Networks of torchvision in float64, and clients of different sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.parts import Parts, batchnorm_layers, split_state
from fedbn_flwr.errors import ConfigError, NormLayerError, RunFailedError
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.server.methods.method import RunSettings
from fedbn_flwr.strategies import (
    FBN,
    HBN,
    MTFL,
    BNScaffold,
    FedBN,
    FedDNA,
    FedProx,
    FedTAN,
    FedTAN2,
    FixBN,
    SiloBN,
    StaticBN,
    combined,
)
from tests.support.small_vision import VISION
from tests.support.user_loops import SIZES, fixbn_loop, hooked_loop, plain_loop

TRACKED = ("running_mean", "running_var", "num_batches_tracked")
LEAVES = {
    FedBN: ("weight", "bias", *TRACKED),
    SiloBN: TRACKED,
    MTFL: ("weight", "bias"),
}
# of each network: the layers of its first half, as a user names them
FIRST_HALF = {
    "densenet": (
        "features.norm0,*block1,features.transition1.*",
        ("features.norm0", "features.denseblock1.", "features.transition1."),
    ),
    "mobilenet_v2": (
        ",".join(f"features.{number}" for number in range(9)),
        tuple(f"features.{number}." for number in range(9)),
    ),
}


def network(name: str = "densenet") -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return VISION[name](num_classes=3).double()


@pytest.fixture
def datasets(points: Any) -> list[Any]:
    """The images of three clients of different sizes."""
    return [points(n, i, shape=(3, 16, 16)) for i, n in enumerate(SIZES)]


def entries_below(
    model: nn.Module, prefixes: tuple[str, ...], leaves: Collection[str]
) -> set[str]:
    """The entries of the BatchNorm layers at these places, from walking the modules."""
    entries = set()
    for path, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and path.startswith(prefixes):
            own = layer.state_dict().keys() & set(leaves)
            entries |= {f"{path}.{leaf}" for leaf in own}
    return entries


def averages_of_the_replies(run: Any, shared: Collection[str]) -> None:
    """Check each round against sum p_i x_i in float64, and the greatest counter."""
    replies = [m for m in run.grid.received if m.metadata.message_type == "train"]
    rounds = [replies[i : i + 3] for i in range(0, len(replies), 3)]
    for number, of_round in enumerate(rounds, start=1):
        states = {
            run.grid.partition(m.metadata.src_node_id): from_record(m.content["arrays"])
            for m in of_round
        }
        assert all(set(state) == set(shared) for state in states.values())
        for name in shared:
            values = [states[i][name] for i in range(3)]
            if values[0].dtype.kind == "i":
                assert run.history[number][name] == max(values)
                continue
            wanted = sum(n * x for n, x in zip(SIZES, values, strict=True)) / sum(SIZES)
            np.testing.assert_allclose(
                run.history[number][name], wanted, rtol=1e-12, atol=1e-15
            )


@pytest.mark.parametrize("by", ["globs", "function", "mod"])
@pytest.mark.parametrize("method", LEAVES)
@pytest.mark.parametrize("name", FIRST_HALF)
def test_what_stays_is_that_of_the_first_half_and_the_others_are_averaged(
    federate: Any,
    user_app: Any,
    run_app: Any,
    datasets: Any,
    name: str,
    method: type[FedBN],
    by: str,
) -> None:
    build = functools.partial(network, name)
    layers, prefixes = FIRST_HALF[name]
    if by == "function":
        chosen = split_state(build(), lambda path, module: path.startswith(prefixes))
        strategy = method(parts=chosen)
    else:
        strategy = method(layers=layers)
    if by == "mod":
        app = user_app(plain_loop, model=build)
        run = run_app(strategy, app, model=build, rounds=2)
    else:
        run = federate(strategy, build, datasets, rounds=2, rate=0.01)
    assert [report.rejected for report in run.strategy.reports] == [{}, {}]

    start = build()
    own = entries_below(start, prefixes, LEAVES[method])
    for client in range(3):
        assert set(run.local_state(client)) == own
    averages_of_the_replies(run, [n for n in start.state_dict() if n not in own])
    # the initial values stay at the server, and each client has its own
    for entry in own:
        assert run.state[entry].tobytes() == start.state_dict()[entry].numpy().tobytes()
    moved = entries_below(start, prefixes, ["running_mean"]) & own
    for entry in moved:
        assert not np.array_equal(run.local_state(0)[entry], run.local_state(1)[entry])


@pytest.mark.parametrize(
    "make",
    [FedBN, SiloBN, MTFL, functools.partial(FixBN, freeze_at=1), StaticBN],
    ids=["fedbn", "silobn", "mtfl", "fixbn", "staticbn"],
)
def test_all_layers_are_the_method_without_layers_to_the_bit(
    federate: Any, datasets: Any, same_bits: Any, make: Callable[..., Any]
) -> None:
    chosen = federate(make(layers="*"), network, datasets, rounds=2, rate=0.01)
    plain = federate(make(), network, datasets, rounds=2, rate=0.01)
    for mine, wanted in zip(chosen.history, plain.history, strict=True):
        same_bits(mine, wanted)
    for kind in ("train", "evaluate"):
        assert chosen.grid.config(kind) == plain.grid.config(kind)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("loop", [None, fixbn_loop, hooked_loop])
def test_fixbn_freezes_the_layers_of_the_backbone_and_no_others(
    federate: Any,
    user_app: Any,
    run_app: Any,
    datasets: Any,
    affine: bool,
    loop: Any,
) -> None:
    """The others go on in train mode, and are averaged."""
    strategy = FixBN(
        freeze_at=1, freeze_affine=affine, layers=FIRST_HALF["densenet"][0]
    )
    if loop is None:
        run = federate(strategy, network, datasets, rounds=3, rate=0.01)
    else:
        run = run_app(strategy, user_app(loop, model=network), model=network, rounds=3)
    assert [report.rejected for report in run.strategy.reports] == [{}] * 3

    leaves = LEAVES[FedBN] if affine else TRACKED
    frozen = entries_below(network(), FIRST_HALF["densenet"][1], leaves)
    everything = entries_below(network(), ("",), LEAVES[FedBN])
    for entry in everything - frozen:
        before, after = run.history[1][entry], run.history[3][entry]
        assert not np.array_equal(before, after), entry
    for entry in frozen:
        for state in run.history[2:]:
            assert state[entry].tobytes() == run.history[1][entry].tobytes(), entry
    averages_of_the_replies(run, list(network().state_dict()))


class Around(nn.Module):
    """A user's module around the network, as Lightning's."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [functools.partial(FixBN, freeze_at=1), StaticBN])
def test_layers_are_found_in_a_module_around_the_network(
    user_app: Any, run_app: Any, same_bits: Any, make: Callable[..., Any]
) -> None:
    def around(model: nn.Module, *rest: Any) -> float:
        return hooked_loop(Around(model), *rest)

    runs = [
        run_app(
            make(layers=FIRST_HALF["densenet"][0]),
            user_app(loop, query=True, model=network),
            model=network,
            rounds=2,
        )
        for loop in (hooked_loop, around)
    ]
    same_bits(runs[1].state, runs[0].state)
    # Two networks inside: which one is meant does not show.
    two = nn.ModuleList([network(), network()])
    with pytest.raises(NormLayerError):
        batchnorm_layers(two, ["features.norm0"])


def test_the_automatic_round_follows_the_chosen_layers_alone(
    federate: Any, datasets: Any
) -> None:
    """delta_m, from the replies of one round."""
    strategy = FixBN(freeze_at="auto", freeze_window=2, layers="*.denseblock3")
    run = federate(strategy, network, datasets, rounds=3, rate=0.01)
    names = entries_below(network(), ("features.denseblock3",), TRACKED[:2])
    deltas = []
    replies = [m for m in run.grid.received if m.metadata.message_type == "train"]
    for reply in replies[:3]:
        sent = from_record(reply.content["arrays"])
        apart = [np.abs(sent[name] - run.history[0][name]).sum() for name in names]
        entries = sum(sent[name].size for name in names)
        number = run.grid.partition(reply.metadata.src_node_id)
        deltas.append((SIZES[number], sum(apart) / entries))
    wanted = sum(n * delta for n, delta in deltas) / sum(SIZES)
    np.testing.assert_allclose(strategy.state.deltas[0], wanted, rtol=1e-12)


@pytest.mark.parametrize("app", [False, True])
def test_staticbn_measures_the_chosen_layers_where_the_others_are_in_eval_mode(
    federate: Any, user_app: Any, run_app: Any, datasets: Any, app: bool
) -> None:
    strategy, prefix = StaticBN(layers="*.denseblock3"), ("features.denseblock3",)
    if app:
        its = user_app(hooked_loop, query=True, model=network)
        run = run_app(strategy, its, model=network, rounds=1)
    else:
        run = federate(strategy, network, datasets, rounds=1, rate=0.01)
    assert strategy.reports[0].rejected == {}

    # the others are averages of what the clients tracked
    chosen = entries_below(network(), prefix, TRACKED)
    (after,) = run.history[1:]
    others = entries_below(network(), ("",), TRACKED) - chosen
    for entry in others:
        assert not np.array_equal(after[entry], run.history[0][entry]), entry

    # each chosen layer: all values that reach it, in batches of four
    model = network()
    model.load_state_dict(tensors(after))
    model.eval()
    seen: dict[str, list[torch.Tensor]] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and path.startswith(prefix):
            layer.train()
            layer.track_running_stats = False
            seen[path] = []
            note = functools.partial(
                lambda values, _, args: values.append(args[0].transpose(0, 1)),
                seen[path],
            )
            layer.register_forward_pre_hook(note)
    with torch.no_grad():
        for data in datasets:
            for inputs in data.inputs.split(4):
                model(inputs)
    assert len(seen) == 4
    for path, values in seen.items():
        of_channel = torch.cat([value.flatten(1) for value in values], 1)
        np.testing.assert_allclose(
            after[f"{path}.running_mean"], of_channel.mean(1), rtol=1e-9, atol=1e-12
        )
        np.testing.assert_allclose(
            after[f"{path}.running_var"], of_channel.var(1), rtol=1e-9
        )


def test_pooled_variances_are_those_of_the_other_layers_too(
    federate: Any, datasets: Any, same_bits: Any
) -> None:
    """Before T* a round is FedAvg's, by whatever layers will be frozen."""
    for server_round in (0, 1):
        mine = federate(
            FixBN(freeze_at=1, layers="*.denseblock3", variance="pooled"),
            network,
            datasets,
            rounds=2,
            rate=0.01,
        )
        plain = federate(
            FixBN(freeze_at=1, variance="pooled"),
            network,
            datasets,
            rounds=2,
            rate=0.01,
        )
        same_bits(mine.history[server_round], plain.history[server_round])


def test_a_combination_acts_on_the_chosen_layers(federate: Any, datasets: Any) -> None:
    strategy = combined(FedBN, FedProx)(
        layers=["features.denseblock3"], proximal_mu=0.1
    )
    run = federate(strategy, network, datasets, rounds=1, rate=0.01)
    assert set(run.local_state(0)) == entries_below(
        network(), ("features.denseblock3",), LEAVES[FedBN]
    )


WRONG = {
    "no layer": lambda: FedBN(layers="features.norm0,features.nrm5").prepare(
        to_record(network().state_dict()), 2, 1
    ),
    "no layer of the model": lambda: split_state(network(), "classifier"),
    "none chosen": lambda: split_state(network(), lambda path, module: False),
    "names have no modules": lambda: split_state(
        network().state_dict(), lambda path, module: True
    ),
    "a strategy has no modules": lambda: FedBN(layers=lambda path, module: True),
    "other layers than the split's": lambda: FedBN(
        parts=split_state(network(), "features.norm5"), layers="features.norm0"
    ).prepare(to_record(network().state_dict()), 2, 1),
    "nothing apart": lambda: FedProx(layers="features.norm0"),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=list(WRONG))
def test_layers_that_choose_nothing_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    "method", [FBN, HBN, BNScaffold, FedTAN, FedTAN2, FedDNA], ids=lambda m: m.name
)
@pytest.mark.parametrize("by_parts", [False, True])
def test_methods_that_measure_all_layers_together_refuse_a_part(
    method: Any, by_parts: bool
) -> None:
    start = to_record(network().state_dict())
    if by_parts:
        strategy = method(parts=split_state(network(), "features.norm0"))
    else:
        strategy = method(layers="features.norm0")
    with pytest.raises(ConfigError):
        strategy.prepare(start, 200, 1)
    run = RunSettings(200, parts=strategy.parts)
    codes = [problem.code for problem in strategy.methods.problems(run)]
    assert "all-layers" in codes


def test_a_split_without_the_other_layers_is_refused_by_a_torch_client(
    federate: Any, datasets: Any
) -> None:
    """Written by hand, it does not say whether names hid them."""
    whole = split_state(network())
    by_hand = Parts(whole.names, whole.layers[:3])
    with pytest.raises((ConfigError, RunFailedError)):
        federate(FedBN(parts=by_hand), network, datasets, rounds=1)
    said = split_state(network(), [layer.path for layer in by_hand.layers])
    run = federate(FedBN(parts=said), network, datasets, rounds=1, rate=0.01)
    assert run.strategy.reports[0].rejected == {}

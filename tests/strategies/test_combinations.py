"""Allowed and refused pairs of methods in one strategy.

tests/reference compares the numbers of combinations, with hooks of every purpose.
"""

from __future__ import annotations

import itertools

import pytest

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.strategies import (
    METHODS,
    STRATEGIES,
    Ditto,
    FedAdam,
    FedAvg,
    FedBN,
    FedProx,
    FixBN,
    Method,
    combined,
)
from fedbn_flwr.strategies.fedbn import FedBNMethod
from fedbn_flwr.strategies.fedopt import FedAdamMethod

SIZES = (6, 14, 10, 8)
LOCAL = [name for name, method in METHODS.items() if method.role == "local-part"]
STEP = [name for name, method in METHODS.items() if method.role == "server-step"]
TANS = ("fedtan", "fedtan2")
LAWFUL = [
    *itertools.product(LOCAL, ("fedprox", "scaffold", *STEP)),
    *itertools.product((*STEP, "fedprox"), ("staticbn", "fixbn", *TANS)),
    *itertools.product((*STEP, "scaffold"), ("fedprox",)),
    *itertools.product(("scaffold",), ("staticbn", "fixbn")),
    ("mtfl", "fixbn"),
    # Client hooks that keep more than BatchNorm. test_fedrep_and_ditto.py has their laws.
    *itertools.product(
        ("ditto", "fedrep"), (*LOCAL, *STEP, *TANS, "fedprox", "scaffold", "fixbn")
    ),
    ("ditto", "staticbn"),
    ("ditto", "fedrep"),
]


@pytest.mark.parametrize(
    "pair", list(itertools.combinations(STRATEGIES, 2)), ids="+".join
)
def test_every_other_pair_is_refused_with_the_reason(pair: tuple[str, str]) -> None:
    first, second = (STRATEGIES[name] for name in pair)
    if "fedavg" in pair:
        assert combined(first, second) is second
    elif frozenset(pair) in {*map(frozenset, LAWFUL)}:
        assert combined(first, second) is combined(second, first)
    else:
        with pytest.raises(
            ConfigError,
            match=f"{first.name} and {second.name} cannot be combined: .{{20,}}",
        ):
            combined(first, second)


def test_the_own_subclass_of_a_method_can_be_combined() -> None:
    class MineMethod(FedBNMethod):
        name = "mine"

    class Mine(Strategy):
        method = MineMethod

    assert combined(FedAdam, Mine).combination.kinds == (FedAdamMethod, MineMethod)
    assert combined(Mine) is Mine
    assert combined(FedAvg) is FedAvg


def test_the_own_subclass_of_fedavg_adds_nothing_to_a_combination() -> None:
    class Mine(FedAvg):
        _notes = ""

    class Other(FedAvg):
        pass

    for methods in ((FedBN,), (Ditto,), (FedBN, FedProx)):
        for mine in ((Mine,), (Mine, Other), (FedAvg, Mine)):
            assert combined(*mine, *methods) is combined(*methods)
            assert combined(*methods, *mine) is combined(*methods)
    assert combined(Mine, Other) is Mine


class Moves(Method):
    """A user's server step."""

    name = "moves"
    role = "server-step"

    def aggregate(self, state, facts, replies, model):
        return {n: (a + 1).astype(a.dtype) for n, a in model.items()}, state


class Moving(Strategy):
    method = Moves


def test_a_server_step_of_the_users_own_does_not_move_what_fixbn_has_frozen(
    federate_mlp, mlp, same_bits
) -> None:
    strategy = combined(FixBN, Moving)(freeze_at=1, freeze_affine=True)
    assert strategy.name == "moves+fixbn"
    _, first, *_, last = federate_mlp(strategy, rounds=3).history
    affine = split_state(mlp()).affine
    same_bits(*({name: state[name] for name in affine} for state in (first, last)))


def test_a_class_that_overrides_calls_of_flower_is_not_combined_without_a_word(
    federate_mlp,
) -> None:
    asked = []

    class Asking(FedBN):
        def configure_train(self, server_round, *rest):
            asked.append(server_round)
            return super().configure_train(server_round, *rest)

    class AskingAverage(FedAvg):
        configure_train = Asking.configure_train

    class Beginning(FedBN):
        def __init__(self, **settings):
            super().__init__(**settings)

    class Both(Asking):
        method = combined(FedBN, FedProx)

    assert combined(Asking) is combined(Asking, FedAvg) is Asking
    assert combined(AskingAverage) is AskingAverage
    for pair, named in (
        ((Asking, FedProx), "configure_train"),
        ((FedBN, AskingAverage), "configure_train"),
        ((Beginning, FedProx), "__init__"),
    ):
        with pytest.raises(
            ConfigError, match=rf"leave out functions of the class: {named}\."
        ):
            combined(*pair)
    federate_mlp(Both(), rounds=2)
    assert asked == [1, 2]

"""Allowed and refused pairs of methods in one strategy, and the order of hooks.

tests/reference compares the numbers of combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client.hooks import Hooks
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.methods.options import ClipGradients
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.strategies import (
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
from fedbn_flwr.strategies.fedprox import ProximalTerm
from fedbn_flwr.strategies.fedrep import HeadThenBody
from fedbn_flwr.strategies.hbn import HybridStatistics
from fedbn_flwr.strategies.scaffold import ControlVariates
from fedbn_flwr.training import ClientHook, LearningRate, LocalTraining
from fedbn_flwr.training.loop import train

SIZES = (6, 14, 10, 8)
RATE, MU = 0.1, 0.3
LOCAL = ("fedbn", "silobn", "mtfl")
STEP = ("fedavgm", "fedadam", "fedyogi", "fedadagrad")
LAWFUL = [
    *itertools.product(LOCAL, ("fedprox", "scaffold", *STEP)),
    *itertools.product(
        STEP, ("fedprox", "staticbn", "fixbn", "fbn", "hbn", "fedtan", "fedtan2")
    ),
    *itertools.product(
        ("fedprox",),
        ("scaffold", "staticbn", "fixbn", "fbn", "hbn", "fedtan", "fedtan2"),
    ),
    *itertools.product(("scaffold",), ("staticbn", "fixbn", "fbn", "hbn")),
    *itertools.product(("mtfl",), ("fixbn", "fbn", "hbn")),
]
# Client hooks that keep more than BatchNorm. test_fedrep_and_ditto.py has their laws.
WITH_PERSONAL = [
    *itertools.product(
        ("ditto", "fedrep"),
        (*LOCAL, *STEP, "fedprox", "scaffold", "fixbn", "fbn", "hbn"),
    ),
    *itertools.product(("ditto", "fedrep"), ("fedtan", "fedtan2")),
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
    elif frozenset(pair) in {*map(frozenset, (*LAWFUL, *WITH_PERSONAL))}:
        assert combined(first, second) is combined(second, first)
    else:
        with pytest.raises(
            ConfigError,
            match=f"{first.name} and {second.name} cannot be combined: .{{20,}}",
        ):
            combined(first, second)


def test_a_combination_has_the_settings_of_its_methods() -> None:
    strategy = combined(FixBN, FedProx)(
        freeze_at=5, proximal_mu=0.1, fraction_train=0.5
    )
    assert (
        strategy.params.freeze_at,
        strategy.params.proximal_mu,
        strategy.fraction_train,
    ) == (5, 0.1, 0.5)
    assert (strategy.name, type(strategy.params).__name__) == (
        "fedprox+fixbn",
        "FedProxAndFixBNParams",
    )
    with pytest.raises(TypeError, match="eta"):
        combined(FixBN, FedProx)(eta=0.1)


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
    federate, datasets, mlp, same_bits
) -> None:
    strategy = combined(FixBN, Moving)(freeze_at=1, freeze_affine=True)
    assert strategy.name == "moves+fixbn"
    _, first, *_, last = federate(strategy, mlp, datasets, rounds=3).history
    affine = split_state(mlp()).affine
    same_bits(*({name: state[name] for name in affine} for state in (first, last)))


def test_a_class_that_overrides_calls_of_flower_is_not_combined_without_a_word(
    federate, datasets, mlp
) -> None:
    asked = []

    class Asking(FedBN):
        def configure_train(self, server_round, *rest):
            asked.append(server_round)
            return super().configure_train(server_round, *rest)

    class AskingAverage(FedAvg):
        configure_train = Asking.configure_train

    class Both(Asking):
        method = combined(FedBN, FedProx)

    assert combined(Asking) is combined(Asking, FedAvg) is Asking
    assert combined(AskingAverage) is AskingAverage
    for pair in ((Asking, FedProx), (FedBN, AskingAverage)):
        with pytest.raises(
            ConfigError, match=r"leave out functions of the class: configure_train\."
        ):
            combined(*pair)
    federate(Both(), mlp, datasets, rounds=2)
    assert asked == [1, 2]


class Counts(ClientHook):
    """A hook that records weights, alpha and the gradients to be applied."""

    stage = "count"

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.seen: list[list[tuple[Tensor, Tensor]]] = []

    def gradients(self, model: nn.Module) -> None:
        groups = [group["params"] for group in self.optimizer.param_groups]
        self.seen.append([])
        for p in itertools.chain(*groups):
            g = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            self.seen[-1].append((p.detach().clone(), g))


def in_our_loop(model: nn.Module, data: Any, hooks: Sequence[ClientHook]) -> None:
    generators = {"stream": lambda purpose: torch.Generator().manual_seed(0)}
    full = LocalTraining(learning_rate=LearningRate(RATE), batch_size=0, local_epochs=3)
    train(model, data, full, learning_rate=RATE, hooks=hooks, **generators)


def in_an_own_loop(model: nn.Module, data: Any, hooks: Sequence[ClientHook]) -> None:
    rules = Hooks(model.train(), {type(hook).__name__: hook for hook in hooks})
    with rules._block():
        rules.survey(DataLoader(TensorDataset(data.inputs, data.targets), 8))
        optimizer = rules.wrap(torch.optim.SGD(model.parameters(), RATE))
        for _ in range(3):
            optimizer.zero_grad()
            data.loss(model).backward()
            optimizer.step()


@pytest.mark.parametrize("head_steps", [1, 2])
@pytest.mark.parametrize("loop", [in_our_loop, in_an_own_loop])
def test_hooks_act_in_the_order_of_their_stages(
    loop: Any, head_steps: int, mlp, points
) -> None:
    """A hook sees the applied gradients in any order of the hooks.

    SCAFFOLD's new variate is the mean gradient of the steps in which a parameter moved.
    Alpha trains with the body.
    """
    data, head = points(8, 1), frozenset({"3.weight", "3.bias"})
    common = {name: torch.full_like(p, 0.1) for name, p in mlp().named_parameters()}
    ends = []
    for order in itertools.permutations(range(4)):
        model, counts, scaffold = mlp(), Counts(), ControlVariates(head)
        scaffold.receive({"variates": common}, {})
        hbn = HybridStatistics(False, False)
        rep, clips = HeadThenBody(head, head_steps), ClipGradients(0.02)
        movable: list[ClientHook] = [rep, scaffold, counts, hbn]
        hooks = [movable[at] for at in order]
        loop(model, data, [clips, ProximalTerm(MU), *hooks])
        (alpha,) = hbn.keep().values()
        last = [*(p.detach() for p in model.parameters()), alpha]
        values = [[w for w, _ in step] for step in counts.seen] + [last]
        for step, (before, after) in enumerate(itertools.pairwise(values)):
            for at, (w, new) in enumerate(zip(before, after, strict=True)):
                moves = step < head_steps if at in (4, 5) else step >= head_steps
                torch.testing.assert_close(new, w - RATE * counts.seen[step][at][1])
                assert torch.equal(w, new) != moves
        body = {name: at for at, name in enumerate(common) if name not in head}
        for name, at in body.items():
            applied = torch.stack([step[at][1] for step in counts.seen[head_steps:]])
            variate = applied.mean(0) - common[name]
            torch.testing.assert_close(scaffold.keep()[name], variate)
        ends.append(torch.cat([w.flatten() for w in last]))
    assert all(torch.equal(end, ends[0]) for end in ends)

"""Registered methods of a user's project, and ``make_hooks`` that finds them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from fedbn_flwr import strategies
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.methods.method import Ask
from fedbn_flwr.server.methods.params import setting
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    FedProx,
    Method,
    Strategy,
    combined,
    make_hooks,
    register,
)
from fedbn_flwr.strategies.fedbn import FedBNMethod
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.transport.hook_context import HookContext

STRENGTH = "tests.strength"
SMALL = 0.3


class SmallGammas(ClientHook):
    """Add lambda times the sum of |gamma| to the loss."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def penalty(self, model: nn.Module) -> Tensor:
        return self.strength * model[1].weight.abs().sum()


class SlimmingParams(FedAvg.Params):
    strength: float = setting(SMALL, "lambda of the penalty", ge=0)


class SlimmingMethod(Method):
    name = "slimming"
    role = "client-hooks"
    Params = SlimmingParams
    client_hooks = {
        "small-gammas": lambda context: SmallGammas(float(context.config[STRENGTH]))
    }

    def on_clients(self, state: Any, facts: Any) -> list[Ask]:
        return [Ask("small-gammas", {STRENGTH: self.params.strength})]


class Slimming(Strategy):
    method = SlimmingMethod


def variant(qualname: str, *bases: type, **fields: Any) -> Any:
    """Return a class as if its statement in this module ran again."""
    return type(
        qualname,
        bases or (Method,),
        {"__module__": __name__, "name": qualname.lower(), **fields},
    )


@pytest.fixture(autouse=True)
def _nothing_stays_registered(monkeypatch) -> None:
    monkeypatch.setattr(strategies, "_REGISTERED", [])


@pytest.mark.parametrize("others", [(FedAvg,), (FedProx,), (FedBN, FedProx)])
def test_a_registered_method_acts_alone_and_combined(
    others, federate, points, mlp, same_bits
) -> None:
    """With strength 0, it changes no bit."""
    data, ends = [points(8, 1), points(6, 2)], []
    register(SlimmingMethod)
    kind = combined(Slimming, *others)
    for strategy in (combined(*others)(), kind(strength=0.0), kind()):
        run = federate(strategy, mlp, data, rounds=2)
        ends.append(run.state | (run.local_state(0) if FedBN in others else {}))
    plain, weak, strong = ends
    same_bits(weak, plain)
    assert (abs(strong["1.weight"]) < abs(plain["1.weight"])).all()


def test_an_unknown_hook_names_the_two_things_that_may_be_missing() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"unknown client hook 'small-gammas'\..*@register.*also import its module in the"
            r" client app"
        ),
    ):
        make_hooks(["small-gammas"], HookContext({STRENGTH: SMALL}))


@pytest.mark.parametrize(
    ("hook", "owner"),
    [("proximal", "'fedprox' (fedbn_flwr."), ("small-gammas", "'slimming' (")],
)
def test_two_strategies_that_make_a_hook_in_two_ways_are_refused(
    hook: str, owner: str
) -> None:
    register(SlimmingMethod)
    mine = variant("Mine", client_hooks={hook: lambda context: ClientHook()})
    with pytest.raises(ConfigError) as error:
        register(mine)
    of_mine = f"client hook '{hook}' of strategy 'mine' ({__name__}.Mine)"
    for words in (of_mine, f"strategy {owner}"):
        assert words in str(error.value)
    assert mine not in strategies._REGISTERED


def test_a_class_statement_that_is_run_again_replaces_the_class() -> None:
    """A class derived from it inherits nothing stale."""

    def run_cell(hook: ClientHook) -> Any:
        return register(variant("Cell", client_hooks={"of-cell": lambda _: hook}))

    first, hook = run_cell(ClientHook()), ClientHook()
    own = {**first.client_hooks, "own": lambda _: ClientHook()}
    register(variant("Derived", first, client_hooks=own))
    second = run_cell(hook)
    assert make_hooks(["of-cell", "own"], HookContext({}))["of-cell"] is hook
    register(variant("Later", second))
    register(variant("Derived", second))
    with pytest.raises(ConfigError, match="unknown client hook 'own'"):
        make_hooks(["own"], HookContext({}))


def test_a_registered_class_has_a_name_of_its_own() -> None:
    class Mine(FedBNMethod):
        pass

    with pytest.raises(ConfigError, match=r"Mine\): .* inherits 'fedbn'.* name = "):
        register(Mine)

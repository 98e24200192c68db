"""A user's own app with the mod and the client hooks ends in the same bits as our own client."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.mods import bn_rules
from fedbn_flwr.strategies import (
    FBN,
    HBN,
    MTFL,
    BNScaffold,
    FedAvg,
    FedBN,
    FedBS,
    FedDNA,
    FedProx,
    FedTAN,
    FedTAN2,
    FedWon,
    FixBN,
    Scaffold,
    SiloBN,
    Standalone,
    StaticBN,
    Strategy,
)
from tests.support.user_loops import SIZES, batches, fixbn_loop, hooked_loop


def same_reports(one: Strategy, other: Strategy) -> None:
    for a, b in zip(one.reports, other.reports, strict=True):
        assert (a.phase, a.participants, a.rejected, a.train) == (b.phase, b.participants, b.rejected, b.train)
        assert {k: v["loss"] for k, v in a.evaluations.items()} == pytest.approx(
            {k: v["loss"] for k, v in b.evaluations.items()}
        )


@pytest.mark.parametrize("method", [FedAvg, FedBN, SiloBN, MTFL, Standalone])
def test_an_unchanged_app_with_the_mod_equals_our_client(
    federate, run_app, user_app, datasets, mlp, same_bits, method
) -> None:
    ours = federate(method(), mlp, datasets)
    theirs = run_app(method(), user_app())
    same_bits(theirs.state, ours.state)
    same_reports(theirs.strategy, ours.strategy)
    assert theirs.strategy.run.kept.hashes.keys() == ours.strategy.run.kept.hashes.keys()
    for i in range(len(SIZES)) if method().local else ():
        same_bits(theirs.local_state(i), ours.local_state(i))


def test_fixbn_needs_one_line_in_the_users_loop(federate, run_app, user_app, datasets, mlp, same_bits) -> None:
    make = functools.partial(FixBN, freeze_at=1)
    ours = federate(make(), mlp, datasets)
    theirs = run_app(make(), user_app(fixbn_loop))
    same_bits(theirs.state, ours.state)
    without_mod = run_app(make(), user_app(fixbn_loop, mods=()))
    assert [report.rejected for report in without_mod.strategy.reports] == [{}] * 3, "the arrays prove it"
    for name, array in theirs.state.items():
        np.testing.assert_allclose(without_mod.state[name], array, rtol=1e-12)


HOOKS: dict[str, tuple[Callable[[], Strategy], float]] = {
    "fedprox": (functools.partial(FedProx, proximal_mu=0.5), 0.0),
    "scaffold": (functools.partial(Scaffold, server_learning_rate=0.8), 0.0),
    "bn-scaffold": (BNScaffold, 0.0),
    "momentum local": (functools.partial(FedAvg, momentum_scope="local"), 0.9),
    "momentum global": (functools.partial(FedAvg, momentum_scope="global"), 0.9),
    "fedbn and momentum": (functools.partial(FedBN, momentum_scope="global"), 0.9),
    "fixbn, affine too": (functools.partial(FixBN, freeze_at=1, freeze_affine=True), 0.0),
    "fbn by steps": (FBN, 0.9),
    "hbn": (functools.partial(HBN, share_alpha=True), 0.9),
    "fbn by a pass": (functools.partial(FBN, fbn_measure="pass"), 0.0),
    "fixbn, automatic": (functools.partial(FixBN, freeze_at="auto", freeze_window=2, freeze_tau=1e9), 0.0),
}


@pytest.mark.parametrize("case", HOOKS)
def test_hooks_in_the_users_loop_equal_our_client(
    federate, run_app, user_app, datasets, mlp, same_bits, case: str
) -> None:
    make, momentum = HOOKS[case]
    ours = federate(make(), mlp, datasets, sgd_momentum=momentum)
    theirs = run_app(make(), user_app(functools.partial(hooked_loop, momentum=momentum)))
    same_bits(theirs.state, ours.state)
    same_reports(theirs.strategy, ours.strategy)


@pytest.mark.parametrize("as_keyword", [True, False])
@pytest.mark.parametrize("case", ["fedprox", "scaffold"])
def test_hooks_act_on_gradients_that_a_closure_computes(
    federate, run_app, user_app, datasets, mlp, same_bits, case: str, as_keyword: bool
) -> None:
    """As Lightning's loop: ``optimizer.step(closure)`` with everything inside."""
    make, momentum = HOOKS[case]

    def loop(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        with bn_rules(model, msg, context) as rules:
            optimizer = rules.wrap(torch.optim.SGD(model.parameters(), 0.1, momentum=momentum))
            for batch in batches(data, msg, context):

                def closure(inputs: torch.Tensor = batch[0], targets: torch.Tensor = batch[1]) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(inputs), targets)
                    loss.backward()
                    return loss.detach()

                assert float(optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)) > 0
        return 0.0

    ours = federate(make(), mlp, datasets, sgd_momentum=momentum)
    same_bits(run_app(make(), user_app(loop)).state, ours.state)


def test_gradient_clipping_in_the_users_loop_equals_our_client(
    federate, run_app, user_app, datasets, wsconv_net, same_bits
) -> None:
    ours = federate(FedWon(agc=0.02), wsconv_net, datasets)
    theirs = run_app(FedWon(agc=0.02), user_app(hooked_loop, model=wsconv_net), model=wsconv_net)
    same_bits(theirs.state, ours.state)


@pytest.mark.parametrize("barrier", [True, False], ids=["barrier", "messages"])
@pytest.mark.parametrize("method", [FedTAN, FedDNA, functools.partial(FedTAN2, fedtan_rounds=1)])
def test_a_synchronised_step_in_the_users_loop_equals_our_client(
    federate, run_app, user_app, datasets, mlp, same_bits, method, barrier: bool
) -> None:
    ours = federate(method(), mlp, datasets, rounds=2, grid_options={"threads": 3})
    theirs = run_app(method(), user_app(hooked_loop, query=True), rounds=2, barrier=barrier)
    same_bits(theirs.state, ours.state)
    assert [report.rejected for report in theirs.strategy.reports] == [{}] * 2
    exchanges = 1 + (2 if method is FedDNA else 3)
    assert theirs.strategy.reports[0].train.exchanges == exchanges, "2 or 3 for one layer, and the model"
    assert not [key for i in range(3) for key in theirs.context(i).state if "step" in key], "no replay log is left"


@pytest.mark.parametrize("make", [StaticBN, functools.partial(SiloBN, recalibrate=True)], ids=["staticbn", "silobn"])
def test_statistics_reestimated_from_a_loader_equal_our_clients(
    federate, run_app, user_app, datasets, mlp, same_bits, make: Any
) -> None:
    ours = federate(make(), mlp, datasets)
    theirs = run_app(make(), user_app(hooked_loop, query=True))
    same_bits(theirs.state, ours.state)
    same_reports(theirs.strategy, ours.strategy)


def test_fedbs_weighs_clients_by_the_users_metric(federate, run_app, user_app, datasets, mlp) -> None:
    ours = federate(FedBS(fedbs_rounds=9), mlp, datasets, rounds=2)
    theirs = run_app(FedBS(fedbs_rounds=9, loss_key="train_loss"), user_app(), rounds=2)
    for name, array in ours.state.items():
        np.testing.assert_allclose(theirs.state[name], array, rtol=1e-9)


@pytest.mark.parametrize("method", [Scaffold, BNScaffold, FixBN, FBN, HBN, FedTAN])
def test_a_compiled_model_in_the_users_loop_gives_the_same_bits(run_app, user_app, same_bits, method: Any) -> None:
    def loop(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        return hooked_loop(torch.compile(model, backend="eager"), data, msg, context)

    torch._dynamo.reset()  # what was compiled for another method must not be used here
    plain = run_app(method(), user_app(hooked_loop, query=True), rounds=2, barrier=False)
    # torch's compiler parses Python, which in 3.11 is not safe in several threads ("AST constructor recursion depth").
    compiled = run_app(method(), user_app(loop, query=True), rounds=2, barrier=False, grid_options={"threads": 1})
    assert not any(report.rejected for report in compiled.strategy.reports)
    same_bits(compiled.state, plain.state)

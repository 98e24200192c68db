"""A user's NumPyClient with the mod, by messages and in Flower's legacy loop.

test_user_loops.py compares its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from fedbn_flwr.client import client_app
from fedbn_flwr.errors import NothingTrainedError
from fedbn_flwr.mods import bn_mod
from fedbn_flwr.strategies import FedAvg, FedBN, FedProx, Scaffold
from fedbn_flwr.training import LearningRate, LocalTraining
from tests.support.federation import torch_clients
from tests.support.their_client import TheirClient, numpy_clients
from tests.support.user_loops import SIZES

ROUNDS = 3


@pytest.fixture
def client_fn(mlp, datasets) -> Callable:
    """``client_fn(kind=TheirClient, ...)`` makes a project's function of that name."""
    return lambda kind=TheirClient, **attributes: numpy_clients(
        mlp, datasets, kind, **attributes
    )


@pytest.fixture
def by_the_loop(run_legacy_loop, mlp) -> Callable:
    """``by_the_loop(strategy, client_fn, ...)`` runs in Flower's legacy loop."""

    def run(
        strategy,
        client_fn,
        mods=(bn_mod,),
        **options,
    ):
        app = client_fn
        if not isinstance(app, ClientApp):
            app = ClientApp(client_fn=client_fn, mods=list(mods))
        start = mlp().state_dict()
        return run_legacy_loop(strategy, app, start, len(SIZES), ROUNDS, **options)

    return run


def all_refused(strategy: Any, said: str) -> None:
    reasons = strategy.reports[0].rejected.values()
    assert [said in reason for reason in reasons] == [True] * len(SIZES)


class Silent(TheirClient):
    get_properties = NumPyClient.get_properties


class Worded(TheirClient):
    def get_properties(self, config: dict) -> dict:
        return {"partition-id": str(self.context.node_config["partition-id"])}


@pytest.mark.parametrize("kind", [Silent, Worded])
def test_a_client_without_properties_is_known_by_its_partition(
    by_the_loop, client_fn, kind
) -> None:
    """Node ids change from run to run, and a sum in their order would change."""
    strategy = FedAvg(fraction_evaluate=0.0)
    by_the_loop(strategy, client_fn(kind))
    assert [report.participants for report in strategy.reports] == [[0, 1, 2]] * ROUNDS


class Short(TheirClient):
    def fit(self, parameters: Any, config: dict):
        return parameters[:-1], 1, {}


class Unwritten(TheirClient):
    fit = NumPyClient.fit


@pytest.mark.parametrize(
    ("made", "kind", "said"),
    [
        (ClientApp, Short, "fit returned 8 arrays"),
        (ClientApp, Unwritten, "`fit`"),
        (client_app, TheirClient, "ClientApp(client_fn, mods=[bn_mod])"),
    ],
)
def test_an_app_that_the_loop_cannot_use_is_refused_with_the_cause(
    by_the_loop, client_fn, made, kind, said: str
) -> None:
    strategy = FedBN(fraction_evaluate=0.0)
    with pytest.raises(NothingTrainedError):
        by_the_loop(strategy, made(client_fn(kind), mods=[bn_mod]))
    all_refused(strategy, said)


@pytest.mark.parametrize("make", [FedBN, Scaffold])
def test_our_own_client_with_the_mod_is_refused_with_advice(
    run_app, make, mlp, datasets
) -> None:
    training = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
    strategy = make(fraction_evaluate=0.0)
    app = client_app(torch_clients(mlp, datasets, training), mods=[bn_mod])
    run_app(strategy, app, fails=NothingTrainedError)
    all_refused(strategy, "Leave the mod out")


def test_metrics_of_the_mod_do_not_reach_the_projects_aggregation(
    by_the_loop, client_fn
) -> None:
    seen = []
    own = {"score": 0.5, "word": "fine", "partition-id": 7, "done": True}

    class Counting(TheirClient):
        def fit(self, parameters: Any, config: dict):
            return parameters, 1, own

    def aggregate(results) -> dict:
        seen.extend(metrics for _, metrics in results)
        return {}

    strategy = FedBN(fraction_evaluate=0.0)
    by_the_loop(strategy, client_fn(Counting), fit_metrics_aggregation_fn=aggregate)
    assert seen == [own] * ROUNDS * len(SIZES)


@pytest.mark.parametrize("way", ["messages", "loop"])
def test_client_hooks_work_in_each_round_without_the_mod(
    run_app, by_the_loop, client_fn, way: str
) -> None:
    """The client itself returns the report of the block.

    From round 2 on, it was once refused as a second block.
    """

    class Reporting(TheirClient):
        def fit(self, parameters: Any, config: dict):
            arrays, count, _ = super().fit(parameters, config)
            return arrays, count, {"fedbn-flwr.hooks-applied": "proximal"}

    strategy = FedProx(proximal_mu=0.3, fraction_evaluate=0.0)
    function = client_fn(Reporting)
    if way == "messages":
        run_app(strategy, client_app(function))
    else:
        by_the_loop(strategy, function, mods=())
    assert [report.rejected for report in strategy.reports] == [{}] * ROUNDS

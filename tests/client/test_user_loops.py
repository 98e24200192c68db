"""A user's training loop with the mod gives the bits of our own client.

The tests are one table of methods and ways. The oracle of a method is ``TorchClient``
with the same data and batches, over the Message API.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from flwr.clientapp import ClientApp
from torch import nn

from fedbn_flwr.client import client_app
from fedbn_flwr.mods import bn_mod
from fedbn_flwr.strategies import (
    Ditto,
    FedAvg,
    FedBN,
    FedBS,
    FedDNA,
    FedProx,
    FedTAN,
    FixBN,
    Scaffold,
    StaticBN,
    Strategy,
)
from fedbn_flwr.training import LearningRate, LocalTraining
from tests.support.fast import fast
from tests.support.federation import torch_clients
from tests.support.in_parts import InParts, Joined
from tests.support.their_client import numpy_clients
from tests.support.user_loops import (
    BATCH,
    SIZES,
)

ROUNDS = 3
Make = Callable[[], Strategy]
METHODS: dict[str, Make] = {
    "fedbn": FedBN,
    "fedprox": functools.partial(FedProx, proximal_mu=0.5),
    "scaffold": functools.partial(Scaffold, server_learning_rate=0.8),
    "fixbn": functools.partial(FixBN, freeze_at=1),
    "fixbn, automatic": functools.partial(
        FixBN, freeze_at="auto", freeze_window=2, freeze_tau=1e9
    ),
    "fedbn, global momentum": functools.partial(FedBN, momentum_scope="global"),
    "fedtan": FedTAN,
    "feddna": FedDNA,
    "staticbn": StaticBN,
}
SERVERS: dict[str, Make] = {
    # A user's loop contains no part of these methods. They run in another loop over
    # rounds.
    "sampled": lambda: FedAvg(
        fraction_train=0.5,
        fraction_evaluate=0.5,
        min_train_nodes=1,
        min_evaluate_nodes=1,
    ),
    "ditto": Ditto,
}
ALL = METHODS | SERVERS
SYNCHRONISED = ("feddna", "fedtan")
WITH_MOMENTUM = ("fedbn, global momentum",)


def momentum_of(name: str) -> float:
    return 0.9 if name in WITH_MOMENTUM else 0.0


@dataclass
class Ways:
    """The ways to run the clients of a method."""

    federate: Any
    run_app: Any
    run_legacy_loop: Any
    user_app: Any
    datasets: Any
    mlp: Any

    def ours(self, name: str) -> Any:
        """Run our own client by messages, with a barrier between the clients."""
        if name not in OURS:
            options = {
                "sgd_momentum": momentum_of(name),
                "grid_options": {"threads": len(SIZES)},
            }
            OURS[name] = self.federate(
                ALL[name](), self.mlp, self.datasets, rounds=ROUNDS, **options
            )
        return OURS[name]

    def numpy_fn(self, name: str) -> Any:
        rules = name != "fedbn"
        return numpy_clients(
            self.mlp, self.datasets, has_rules=rules, momentum=momentum_of(name)
        )

    def numpy_client(self, name: str, barrier: bool = True) -> Any:
        app = client_app(self.numpy_fn(name), mods=[bn_mod])
        threads = {"threads": len(SIZES)}
        return self.run_app(
            ALL[name](),
            app,
            model=self.mlp,
            rounds=ROUNDS,
            barrier=barrier,
            grid_options=threads,
        )

    def numpy_client_by_messages(self, name: str) -> Any:
        return self.numpy_client(name, barrier=False)

    def our_client_in_the_legacy_loop(self, name: str) -> Any:
        training = LocalTraining(
            learning_rate=LearningRate(0.1),
            batch_size=BATCH,
            sgd_momentum=momentum_of(name),
        )
        client_fn = torch_clients(self.mlp, self.datasets, training)
        return self._legacy(
            name, ClientApp(client_fn=lambda context: client_fn(context).to_client())
        )

    def in_parts(self, name: str) -> Any:
        """Run our own client with inputs in parts that the model joins."""
        data = [InParts(own) for own in self.datasets]
        options = {
            "sgd_momentum": momentum_of(name),
            "grid_options": {"threads": len(SIZES)},
        }
        return self.federate(
            ALL[name](),
            lambda: Joined(*self.mlp().children()),
            data,
            rounds=ROUNDS,
            **options,
        )

    def _legacy(self, name: str, app: ClientApp) -> Any:
        start = self.mlp().state_dict()
        return self.run_legacy_loop(ALL[name](), app, start, len(SIZES), ROUNDS)


OURS: dict[str, Any] = {}  # the oracle of each method, once for all its ways
# tests/reference draws every method with loops of the Message API. The other ways have
# each kind of method here. The first kind is in the fast suite.
TABLE: dict[str, Any] = {
    "numpy_client": (*("fedbn", "scaffold", "fixbn", "fedtan"),),
    "numpy_client_by_messages": SYNCHRONISED,
    "in_parts": ("fedbn", "fedtan", "staticbn"),
    "our_client_in_the_legacy_loop": (
        *("sampled", "ditto", "fixbn, automatic", "fedbn, global momentum"),
    ),
}


def copies_of(model: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that builds a model without draws.

    A thread of the earlier run may still restore the generators.
    """
    return lambda: copy.deepcopy(model)


@pytest.fixture
def ways(federate, run_app, run_legacy_loop, user_app, datasets, mlp) -> Ways:
    same = copies_of(mlp())
    return Ways(federate, run_app, run_legacy_loop, user_app, datasets, same)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        case
        for way, names in TABLE.items()
        for case in fast([(way, name) for name in names], 0)
    ],
)
def test_every_way_of_a_loop_has_the_bits_of_our_client(
    way: str, name: str, ways: Ways, same_bits
) -> None:
    ours = ways.ours(name)
    theirs = getattr(ways, way)(name)
    if "legacy" in way:
        history = [
            dict(zip(ours.state, arrays, strict=True)) for arrays in theirs.history
        ]
        assert len(history) == ROUNDS + 1
    else:
        history = theirs.history
    for mine, state in zip(history, ours.history, strict=True):
        same_bits(mine, state)
    assert theirs.strategy.run.kept.hashes == ours.strategy.run.kept.hashes
    for mine, report in zip(
        theirs.strategy.reports, ours.strategy.reports, strict=True
    ):
        assert (mine.phase, mine.participants, mine.rejected) == (
            report.phase,
            report.participants,
            {},
        )
        assert mine.train == report.train or "numpy" in way or "messages" in way
        tested = {client: found["loss"] for client, found in mine.evaluations.items()}
        assert tested == pytest.approx(
            {client: found["loss"] for client, found in report.evaluations.items()}
        )
    if way == "our_client_in_the_legacy_loop":
        same_metrics_too(theirs, ours)


def same_metrics_too(legacy: Any, ours: Any) -> None:
    """Assert that the legacy loop has the traffic and metrics of messages."""
    for mine, report in zip(
        legacy.strategy.reports, ours.strategy.reports, strict=True
    ):
        assert mine.evaluate == report.evaluate, "the same bytes"
        assert (mine.metrics, mine.clients, mine.evaluations) == (
            report.metrics,
            report.clients,
            report.evaluations,
        )
    records = ours.result.evaluate_metrics_clientapp.values()
    for (loss, metrics), record in zip(legacy.evaluations, records, strict=True):
        assert {"loss": loss, **metrics} == dict(record)


def test_fedbs_weighs_clients_by_the_users_metric(ways: Ways, user_app) -> None:
    ours = ways.federate(FedBS(fedbs_rounds=9), ways.mlp, ways.datasets, rounds=2)
    theirs = ways.run_app(
        FedBS(fedbs_rounds=9, loss_key="train_loss"), user_app(), rounds=2
    )
    for name, array in ours.state.items():
        np.testing.assert_allclose(theirs.state[name], array, rtol=1e-9)

"""A user's training loop with the mod gives the bits of our own client.

The tests are one table of methods and ways. The oracle of a method is ``TorchClient``
with the same data and batches, over the Message API.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.client import client_app
from fedbn_flwr.mods import bn_mod
from fedbn_flwr.strategies import (
    Ditto,
    FedAvg,
    FedBN,
    FedBS,
    FedDNA,
    FedTAN,
    FixBN,
    Scaffold,
    StaticBN,
)
from fedbn_flwr.training import MULTI_LABEL, LearningRate, LocalTraining
from tests.support.fast import fast
from tests.support.federation import torch_clients
from tests.support.in_parts import InParts, Joined
from tests.support.their_client import numpy_clients
from tests.support.user_loops import (
    BATCH,
    SIZES,
)

ROUNDS = 3
METHODS = {
    "fedbn": FedBN,
    "scaffold": functools.partial(Scaffold, server_learning_rate=0.8),
    "fixbn": functools.partial(FixBN, freeze_at=1),
    "fixbn, automatic": functools.partial(
        FixBN, freeze_at="auto", freeze_window=2, freeze_tau=1e9
    ),
    "fedbn, global momentum": functools.partial(FedBN, momentum_scope="global"),
    "fedtan": FedTAN,
    "feddna": FedDNA,
    "staticbn": StaticBN,
    # A user's loop contains no part of the following methods. They run in another loop
    # over rounds.
    "sampled": functools.partial(
        FedAvg,
        fraction_train=0.5,
        fraction_evaluate=0.5,
        min_train_nodes=1,
        min_evaluate_nodes=1,
    ),
    "ditto": Ditto,
}
SYNCHRONISED = ("feddna", "fedtan")
THREADS = {"threads": len(SIZES)}


def momentum_of(name: str) -> float:
    return 0.9 if name == "fedbn, global momentum" else 0.0


@dataclass
class Ways:
    """The ways to run the clients of a method."""

    federate: Any
    run_app: Any
    run_legacy_loop: Any
    datasets: Any
    mlp: Any

    def ours(self, name: str) -> Any:
        """Run our own client by messages, with a barrier between the clients."""
        if name not in OURS:
            OURS[name] = self.our_client(name, self.mlp, self.datasets)
        return OURS[name]

    def our_client(self, name: str, model: Any, datasets: Any) -> Any:
        return self.federate(
            METHODS[name](),
            model,
            datasets,
            rounds=ROUNDS,
            sgd_momentum=momentum_of(name),
            grid_options=THREADS,
        )

    def numpy_client(self, name: str, barrier: bool = True) -> Any:
        """Run a NumPyClient of a user, without ``bn_rules`` under FedBN."""
        client_fn = numpy_clients(self.mlp, self.datasets, has_rules=name != "fedbn")
        return self.run_app(
            METHODS[name](),
            client_app(client_fn, mods=[bn_mod]),
            model=self.mlp,
            rounds=ROUNDS,
            barrier=barrier,
            grid_options=THREADS,
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
        app = ClientApp(client_fn=lambda context: client_fn(context).to_client())
        start = self.mlp().state_dict()
        return self.run_legacy_loop(METHODS[name](), app, start, len(SIZES), ROUNDS)

    def in_parts(self, name: str) -> Any:
        """Run our own client with inputs in parts that the model joins."""
        data = [InParts(own) for own in self.datasets]
        return self.our_client(name, lambda: Joined(*self.mlp().children()), data)


OURS: dict[str, Any] = {}  # the oracle of each method, once for all its ways
# tests/reference draws every method with loops of the Message API. The other ways have
# each kind of method here. The first kind is in the fast suite.
LEGACY = "our_client_in_the_legacy_loop"
TABLE = {
    "numpy_client": ("fedbn", "scaffold", "fixbn", "fedtan"),
    "numpy_client_by_messages": SYNCHRONISED,
    "in_parts": ("fedbn", "fedtan", "staticbn"),
    LEGACY: ("sampled", "ditto", "fixbn, automatic", "fedbn, global momentum"),
}


@pytest.fixture
def ways(federate, run_app, run_legacy_loop, datasets, mlp) -> Ways:
    # A thread of the earlier run may still restore the generators, so build a model
    # without draws.
    same = functools.partial(copy.deepcopy, mlp())
    return Ways(federate, run_app, run_legacy_loop, datasets, same)


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
    for mine, state in zip(theirs.history, ours.history, strict=True):
        same_bits(dict(zip(state, mine, strict=True)) if way == LEGACY else mine, state)
    assert theirs.strategy.run.kept.hashes == ours.strategy.run.kept.hashes
    for mine, report in zip(
        theirs.strategy.reports, ours.strategy.reports, strict=True
    ):
        assert (mine.phase, mine.participants, mine.rejected) == (
            report.phase,
            report.participants,
            {},
        )
        assert mine.train == report.train or "numpy" in way
        tested, wanted = (
            {client: found["loss"] for client, found in one.evaluations.items()}
            for one in (mine, report)
        )
        assert tested == pytest.approx(wanted)
    if way == LEGACY:
        same_metrics_too(theirs, ours)


def same_metrics_too(legacy, ours) -> None:
    """Assert that the legacy loop has the traffic and metrics of messages."""
    for mine, report in zip(
        legacy.strategy.reports, ours.strategy.reports, strict=True
    ):
        for name in ("evaluate", "metrics", "clients", "evaluations"):
            assert getattr(mine, name) == getattr(report, name), name
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


def loop_of_probabilities(model, batches, rules, learning_rate) -> float:
    """Train with a loss of torch that refuses two types."""
    optimizer = rules.wrap(torch.optim.SGD(model.parameters(), learning_rate))
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy(model(inputs).sigmoid(), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("of_targets", [torch.float64, torch.float16, torch.bool])
@pytest.mark.parametrize("of_model", [torch.float32, torch.float64])
def test_targets_in_columns_have_the_type_of_the_outputs(
    of_model: torch.dtype, of_targets: torch.dtype, federate, points
) -> None:
    """The loop of the package changes the type in its loss."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)).to(of_model)

    data = points(12, 1)
    data.inputs = data.inputs.to(of_model)
    data.targets = (data.inputs[:, :3] > 1).to(of_targets)
    theirs, ours = (
        federate(
            FedAvg(), model, [data, data], task=MULTI_LABEL, rounds=1, **own
        ).tensors
        for own in ({"loop": loop_of_probabilities}, {})
    )
    torch.testing.assert_close(theirs, ours)

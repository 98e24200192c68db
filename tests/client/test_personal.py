"""Entries that a user names with ``personal`` stay with the clients.

They add to the method's local entries. The networks are torchvision's in float64, and
the clients have different sizes.
"""

from __future__ import annotations

import functools

import pytest
from torch import nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.strategies import (
    FedAvg,
)
from fedbn_flwr.training import LearningRate, LocalTraining
from tests.support.fast import fast
from tests.support.user_loops import SIZES
from tests.support.written_out import (
    below,
    close,
    network,
    numbers,
)


@pytest.fixture
def datasets(points) -> list:
    """Return the images of three clients of different sizes."""
    return [points(n, i, shape=(3, 16, 16)) for i, n in enumerate(SIZES)]


@pytest.mark.parametrize("given", fast([False, True], 1))
def test_a_head_of_another_shape_starts_as_its_client_builds_it(
    run_strategy, datasets, given: bool
) -> None:
    """Clients 1 and 2 have five classes and one function that builds their model.

    The learning rate is too small to move a weight. The server's model is in a wrapper.
    """
    five = functools.partial(network, classes=5)
    builds = [network, five, five]
    training = LocalTraining(learning_rate=LearningRate(1e-300), batch_size=4)

    def client_fn(context) -> TorchClient:
        i = int(context.node_config["partition-id"])
        model = builds[i]() if given else builds[i]
        data = datasets[i]
        return TorchClient(model, data, data, training, context=context, seed=7)

    server = nn.ModuleDict({"module": network()})
    strategy = FedAvg(personal="classifier", parts=split_state(server))
    app = client_app(client_fn)
    run = run_strategy(strategy, app, server.state_dict(), 3, rounds=2)
    assert [report.rejected for report in strategy.reports] == [{}] * 2
    stays = below(network(), "classifier.")
    for i, build in enumerate(builds):
        assert {*run.local_state(i)} == stays
        close(run.local_state(i), {n: numbers(build())[n] for n in stays})
    # Shared entries must fit.
    strategy = FedAvg(personal="features.norm0", parts=split_state(network()))
    run_strategy(strategy, app, five().state_dict(), 3, rounds=1)
    assert len(strategy.reports[0].rejected) == 1


def test_a_pattern_names_the_entries_of_a_class() -> None:
    found = split_state(model := network("vit"), personal="type:LayerNorm").personal
    assert {*found} == {name for name in model.state_dict() if "ln" in name}

"""Statistics that StaticBN sends to clients, and layers that do not track them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.strategies import HBN, FedAvg, StaticBN
from fedbn_flwr.strategies.staticbn import Untracked
from tests.support.strange_layers import OwnSums, WithReLU

SIZES = (6, 13, 9)


@pytest.mark.parametrize("make", [StaticBN, HBN, partial(FedAvg, recalibrate=True)])
def test_batchnorm_with_an_activation_inside_is_batchnorm(
    make, federate_mlp, mlp, same_bits
) -> None:
    ours = federate_mlp(make(), model=lambda: mlp(kind=WithReLU))
    same_bits(ours.state, federate_mlp(make()).state)
    # StaticBN measures a layer only for a test.
    said = r"layer '1?' \(OwnSums\) does not call"
    with pytest.raises(FedBNError, match=said):
        federate_mlp(make(), model=lambda: mlp(kind=OwnSums))


def test_a_model_that_is_in_eval_mode_before_its_training_is_not_tracked(mlp) -> None:
    model, hook = mlp().eval(), Untracked()
    hook.begin(model)
    model.train()(torch.randn(4, 5, dtype=torch.float64))
    assert model[1].num_batches_tracked == 0


def test_a_run_that_stops_between_two_tests_ends_with_the_unions_statistics(
    federate_mlp, same_bits, caplog
) -> None:
    """A second run of the strategy is not stopped.

    Warnings report that the tests in between lack re-estimated statistics.
    """
    strategy = StaticBN(eval_every=3)

    def stop(server_round: int) -> None:
        strategy.stopped = server_round == 5

    stopped = federate_mlp(strategy, rounds=9, evaluate_fn=stop)
    words = "has statistics that are not re-estimated"
    told = [text[:7] for text in caplog.messages if words in text]
    assert told == ["round 1", "round 2", "round 4", "round 5"]
    same_bits(stopped.state, federate_mlp(StaticBN(), rounds=5).state)
    assert len(federate_mlp(strategy, rounds=2).reports) == 2

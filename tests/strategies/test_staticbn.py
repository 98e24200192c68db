"""Statistics that StaticBN sends to clients, and layers that do not track them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.strategies import StaticBN
from fedbn_flwr.strategies.staticbn import Untracked

SIZES = (6, 13, 9)


class Own(nn.BatchNorm1d):
    """A layer whose forward pass ignores whether it tracks statistics."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        named = (self.running_mean, self.running_var, self.weight, self.bias)
        return nn.functional.batch_norm(
            x, *named, self.training, self.momentum, self.eps
        )


def test_a_layer_that_may_track_in_any_case_is_refused(federate_mlp, mlp) -> None:
    with pytest.raises(ConfigError, match="layer '1' is a Own with its own forward"):
        federate_mlp(StaticBN(), model=lambda: mlp(kind=Own))


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

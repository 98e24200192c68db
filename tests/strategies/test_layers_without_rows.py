"""BatchNorm without rows, such as an expert that gets no example of a batch.

The oracle is the same model without such calls. Only the counters differ, because torch
counts every call.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.adaptation import TEST_BN_MODES, TestBNMode, evaluate_adapted
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    FixBN,
    StaticBN,
)
from fedbn_flwr.training.tasks import CLASSIFICATION
from tests.support.fast import thinned


class Experts(nn.Module):
    """The sum of the first column decides which expert gets the batch."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.lin_a, self.bn_a, self.lin_b, self.bn_b = (
            nn.Linear(5, 6),
            nn.BatchNorm1d(6),
            nn.Linear(5, 6),
            nn.BatchNorm1d(6),
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x, x[:0]) if x[:, 0].sum() > 0 else (x[:0], x)
        return self.head(
            torch.cat(
                [
                    self.normed(self.bn_a, self.lin_a(a)),
                    self.normed(self.bn_b, self.lin_b(b)),
                ]
            )
        )

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        return x if self.skips and not len(x) else norm(x)


class Skipping(Experts):
    skips = True


def built(kind: type[Experts]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().double()


def without_counters(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name: value
        for name, value in state.items()
        if not name.endswith("num_batches_tracked")
    }


METHODS = {
    "fedavg": FedAvg,
    "recalibrate": partial(FedAvg, recalibrate=True),
    "fedbn": partial(FedBN, eval_on="averaged-bn"),
    "staticbn": StaticBN,
    "fixbn": FixBN,
}


@pytest.mark.parametrize("method", thinned(METHODS))
def test_no_rows_count_nothing(method: str, federate, points) -> None:
    datasets = [points(18, i) for i in range(3)]
    found = federate(METHODS[method](), partial(built, Experts), datasets, rounds=2)
    wanted = federate(METHODS[method](), partial(built, Skipping), datasets, rounds=2)
    assert all(
        not report.rejected and len(report.participants) == 3
        for report in found.strategy.reports
    )
    for name, value in without_counters(wanted.state).items():
        assert np.isfinite(found.state[name]).all(), name
        assert np.array_equal(found.state[name], value), name


@pytest.mark.parametrize("mode", TEST_BN_MODES)
def test_a_test_with_statistics_of_its_inputs(mode: TestBNMode, points) -> None:
    task, data = replace(CLASSIFICATION, test_batch=4), points(24, 3)
    found = evaluate_adapted(built(Experts), data, mode, task)
    wanted = evaluate_adapted(built(Skipping), data, mode, task)
    assert found == wanted
    assert found.loss == found.loss, "no NaN"

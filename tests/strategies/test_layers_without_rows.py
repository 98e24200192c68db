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
from tests.support.seeds import with_seed


class Experts(nn.Module):
    """The sum of the first column decides which expert gets the batch."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(5, 6) for _ in "ab")
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in "ab")
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x, x[:0]] if x[:, 0].sum() > 0 else [x[:0], x]
        for i, rows in enumerate(parts):
            parts[i] = self.lins[i](rows)
            if len(rows) or not self.skips:
                parts[i] = self.norms[i](parts[i])
        return self.head(torch.cat(parts))


class Skipping(Experts):
    skips = True


@with_seed()
def built(kind: type[Experts]) -> nn.Module:
    return kind().double()


SIZES = (18, 18, 18)
METHODS = {
    "fedavg": FedAvg,
    "recalibrate": partial(FedAvg, recalibrate=True),
    "fedbn": partial(FedBN, eval_on="averaged-bn"),
    "staticbn": StaticBN,
    "fixbn": FixBN,
}


@pytest.mark.parametrize("method", thinned(METHODS))
def test_no_rows_count_nothing(method: str, federate, datasets) -> None:
    found, wanted = (
        federate(METHODS[method](), partial(built, kind), datasets, rounds=2)
        for kind in (Experts, Skipping)
    )
    assert [report.participants for report in found.reports] == [[0, 1, 2]] * 2
    for name, value in wanted.state.items():
        assert np.isfinite(found.state[name]).all(), name
        if not name.endswith("num_batches_tracked"):
            assert np.array_equal(found.state[name], value), name


@pytest.mark.parametrize("mode", TEST_BN_MODES)
def test_a_test_with_statistics_of_its_inputs(mode: TestBNMode, points) -> None:
    task, data = replace(CLASSIFICATION, test_batch=4), points(24, 3)
    found = evaluate_adapted(built(Experts), data, mode, task)
    wanted = evaluate_adapted(built(Skipping), data, mode, task)
    assert found == wanted
    assert found.loss == found.loss, "no NaN"

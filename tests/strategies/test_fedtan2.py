"""FedTAN-II equals FedTAN bit for bit up to M and then freezes the statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedbn_flwr.strategies import FedTAN, FedTAN2
from tests.support.synchronised import client_data, synchronised

SIZES = (6, 13, 9)
STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 3)
        ).double()


@pytest.fixture
def data():
    return client_data((5,), SIZES)


def test_fedtan2_is_fedtan_up_to_m_and_frozen_after(
    run_step, model, data, same_bits
) -> None:
    settings = {"rounds": 4, "local_steps": 2, "batch_size": 4}
    run = run_step(synchronised(FedTAN2, fedtan_rounds=2), model, data, **settings)
    full = run_step(synchronised(FedTAN), model, data, **settings)
    for found, wanted in zip(run.history[:3], full.history[:3], strict=True):
        same_bits(found, wanted)
    for found in run.history[3:]:
        for name in STATISTICS:
            assert found[name].tobytes() == run.history[2][name].tobytes(), name
    reports = run.strategy.reports
    assert [r.phase for r in reports] == ["synchronised"] * 2 + ["frozen"] * 2
    assert [r.train.exchanges for r in reports] == [4, 4, 1, 1]
    asked = [config["fedbn-flwr.hooks"] for config in run.grid.config()[:: len(data)]]
    assert asked == ["synchronise-first-step"] * 2 + ["freeze-bn"] * 2

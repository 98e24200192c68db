"""FedTAN-II: FedTAN bit for bit up to M, then statistics that never change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedbn_flwr.client import TorchClient
from fedbn_flwr.strategies import FedTAN, FedTAN2
from tests.support.synchronised import TRANSPORTS, client_data, synchronised

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


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("at", "m"), [(2, 2), (0.5, 2), (0, 0)])
def test_fedtan2_is_fedtan_up_to_m_and_frozen_after(
    run_step, model, data, same_bits, transport: str, at: int | float, m: int
) -> None:
    settings = {"rounds": 5, "local_steps": 2, "batch_size": 4, "transport": transport}
    run = run_step(
        synchronised(FedTAN2, transport, fedtan_rounds=at), model, data, **settings
    )
    full = run_step(synchronised(FedTAN, transport), model, data, **settings)
    assert run.strategy.state.frozen_after == m
    for server_round in range(m + 1):
        same_bits(run.history[server_round], full.history[server_round])
    for server_round in range(m + 1, 6):
        for name in STATISTICS:
            assert (
                run.history[server_round][name].tobytes()
                == run.history[m][name].tobytes()
            ), name
    for name in ("0.weight", "1.weight", "1.bias"):
        assert not np.array_equal(run.history[5][name], run.history[4][name]), name
    reports = run.strategy.reports
    assert [r.phase for r in reports] == ["synchronised"] * m + ["frozen"] * (5 - m)
    asked = {
        config["server-round"]: config["fedbn-flwr.hooks"]
        for config in run.grid.config("train")
    }
    hooks = [[asked[r]] for r in range(1, 6)]
    assert hooks == [["synchronise-first-step"]] * m + [["freeze-bn"]] * (5 - m)
    assert [r.train.exchanges for r in reports] == [4] * m + [1] * (5 - m)
    assert len({r.train.down for r in reports[m:]}) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_automatic_m_follows_the_window_rule(
    run_step, model, data, same_bits, transport: str
) -> None:
    """Deltas 1, .5, .3, .25, .24: the variance of three falls under 0.012 after round 4
    (0.0116...), not 3 (0.087).
    """
    deltas = [1.0, 0.5, 0.3, 0.25, 0.24, 9.0]
    window = [float(np.var(deltas[i - 3 : i])) for i in (3, 4)]
    assert window[1] < 0.012 < window[0]

    class Scripted(TorchClient):
        def fit(self, parameters, config):
            arrays, count, metrics = super().fit(parameters, config)
            if "statistics-delta" in metrics:
                metrics["statistics-delta"] = deltas[config["server-round"] - 1]
            return arrays, count, metrics

    strategy = synchronised(
        FedTAN2, transport, fedtan_rounds="auto", freeze_window=3, freeze_tau=0.012
    )
    run = run_step(
        strategy,
        model,
        data,
        transport=transport,
        rounds=6,
        client=Scripted,
        local_steps=2,
        batch_size=4,
    )
    assert strategy.state.frozen_after == 4
    assert strategy.state.deltas == pytest.approx(deltas[:4])
    assert [r.phase for r in strategy.reports] == ["synchronised"] * 4 + ["frozen"] * 2
    for name in STATISTICS:
        assert run.history[6][name].tobytes() == run.history[4][name].tobytes()
    fixed = run_step(
        synchronised(FedTAN2, transport, fedtan_rounds=4),
        model,
        data,
        transport=transport,
        rounds=6,
        local_steps=2,
        batch_size=4,
    )
    same_bits(run.state, fixed.state)


def test_delta_is_measured_after_the_synchronised_step(run_step, model, data) -> None:
    """With one step and momentum m every client's statistics move alike: m (union's -
    received), by hand.
    """
    strategy = synchronised(
        FedTAN2, fedtan_rounds="auto", freeze_window=2, freeze_tau=1e-30
    )
    run = run_step(strategy, model, data, rounds=3)
    before, after = run.history[1], run.history[2]
    moved = sum(np.abs(after[name] - before[name]).sum() for name in STATISTICS[:2]) / 8
    assert strategy.state.deltas[1] == pytest.approx(moved, rel=1e-9)

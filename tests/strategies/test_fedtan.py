"""FedTAN's settings, its traffic and its gRPC channel in a whole run.

The law and the dropouts have their own files.
"""

from __future__ import annotations

import logging
import socket
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.client import TorchClient
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.strategies import FedDNA, FedTAN
from tests.support.fast import fast
from tests.support.seeds import with_seed
from tests.support.strange_layers import Checkpointed
from tests.support.synchronised import (
    TRANSPORTS,
    Branches,
    client_data,
    synchronised,
    trained,
)


@with_seed(1)
def branches() -> nn.Module:
    return trained(Branches())


# With messages, a client repeats its step for each of the 58 exchanges. A smaller model
# below shows the same bytes.
@pytest.mark.parametrize(
    "transport",
    fast(["barrier", "channel", "messages"], "barrier"),
)
def test_the_traffic_of_fedtan_with_resnet20_is_table_3(
    run_step, transport: str
) -> None:
    """The measured traffic of five clients equals the prediction of ``inspect``.

    Floats have 32 bits, 1 MB is 2^20 bytes, and counts are measured separately.
    """
    model = build_model("resnet20", num_classes=10, channels=3, size=32)
    data = client_data((3, 8, 8), [2] * 5, classes=10, dtype=torch.float32)
    made = synchronised(FedTAN, transport)
    report = run_step(made, model, data, transport=transport).reports[0].train
    assert round((report.down + report.up) / 2**20, 4) == 6.2679
    assert report.exchanges == 3 * 19 + 1 == 58
    floats, counts = 4 * (271098 + 2 * 1376), 19 * (8 + 4)
    assert (report.down, report.up) == (floats, 5 * floats)
    assert (report.counters_down, report.counters_up) == (counts, 5 * counts)


@pytest.mark.parametrize(
    ("strategy", "exchanges", "rows", "apart", "count"),
    [
        (FedTAN, "3L+1", 4, 1, 28),
        *fast([(FedTAN, "2L+1", 5, 3, 19), (FedDNA, "3L+1", 2, 1, 19)]),
        (FedDNA, "2L+1", 3, 3, 10),
    ],
)
def test_all_transports_move_the_same_bytes_and_give_the_same_bits(
    run_step,
    same_bits,
    strategy,
    exchanges: str,
    rows: int,
    apart: int,
    count: int,
    caplog,
) -> None:
    """Each of nine BatchNorm calls with four channels exchanges rows.

    The rows are mean, variance and two gradients, but FedDNA has no gradients. A fused
    exchange adds the rest of the mean. Counts of examples per element are separate.
    """
    model, data = branches(), client_data((2, 6, 6), (2, 3, 1))
    state, counters = 9 * rows * 4 * 8, 9 * apart * 8
    for value in model.state_dict().values():
        if value.is_floating_point():
            state += value.nbytes
        else:
            counters += value.nbytes
    ends = []
    caplog.set_level(logging.INFO, logger="flwr")
    for transport in TRANSPORTS:
        run = run_step(
            synchronised(strategy, transport, fedtan_exchanges=exchanges),
            model,
            data,
            transport=transport,
        )
        ends.append(run.state)
        same_bits(run.state, ends[0])
        for report in run.reports:
            moved = report.train
            assert moved.exchanges == count, transport
            assert f": {count - 1} exchanges in the sync" in caplog.text
            assert (moved.down, moved.up) == (state, 3 * state), transport
            apart = moved.counters_down, moved.counters_up
            assert apart == (counters, 3 * counters), transport


@pytest.mark.parametrize("fails", [False, True])
def test_the_port_is_closed_after_a_run_that_succeeds_or_fails(
    run_step, fails: bool
) -> None:
    def fail(_, __):
        raise ValueError("no")

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    options = {"train_metrics_aggr_fn": fail} if fails else {}
    strategy = synchronised(
        FedTAN, "channel", fedtan_bind="{}:{}".format(*address), **options
    )
    with pytest.raises(ValueError, match="no") if fails else nullcontext():
        run_step(
            strategy, branches(), client_data((2, 6, 6), (2, 3)), transport="channel"
        )
    with pytest.raises(OSError), socket.create_connection(address, timeout=2):
        pass


def test_a_client_whose_model_cannot_be_synchronised_is_left_out_by_name(
    run_step, points
) -> None:
    class Own(TorchClient):
        def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
            if kwargs["context"].node_config["partition-id"] == 1:
                model = Checkpointed(*model)
            super().__init__(model, *args, **kwargs)

    first = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU())
    model = nn.Sequential(first, nn.Linear(4, 3)).double()
    data = [points(6, i) for i in range(3)]
    run = run_step(synchronised(FedTAN), model, data, client=Own)
    assert "runs inside torch.utils.checkpoint" in run.reason(1)
    assert "redone" not in run.reason(1), "it was tried before the step"
    assert run.reports[0].participants == [0, 2]

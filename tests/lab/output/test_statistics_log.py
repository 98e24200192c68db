"""The server writes BatchNorm's behaviour in a round to ``statistics.jsonl``.

It changes nothing in the run.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.doctor.by_batch import Statistics, distance
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.output.folder import STATISTICS_FILE
from fedbn_flwr.lab.output.statistics_log import (
    local_statistics,
    rounds_with_statistics,
    weight,
)
from fedbn_flwr.lab.runs.run import run

FIXBN = {
    "strategy": "fixbn",
    "freeze-at": 3,
    "num-server-rounds": 11,
    "checkpoint-every": 2,
}


def test_distances_against_plain_python() -> None:
    mean, var, other, var_2, eps = (
        [1.0, -2.0],
        [4.0, 0.25],
        [1.5, -1.0],
        [1.0, 0.5],
        1e-5,
    )
    found = distance(
        Statistics(torch.tensor(other), torch.tensor(var_2)),
        Statistics(torch.tensor(mean), torch.tensor(var)),
        eps,
    )
    assert found.l1 == pytest.approx(0.5 + 1.0 + 3.0 + 0.25)
    assert found.mean == pytest.approx(
        (0.5 / math.sqrt(4 + eps) + 1 / math.sqrt(0.25 + eps)) / 2
    )
    assert found.variance == pytest.approx(
        (math.log((4 + eps) / (1 + eps)) + math.log((0.5 + eps) / (0.25 + eps))) / 2
    )


@pytest.mark.parametrize("momentum", [0.1, 0.01, None])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_batch_statistics_come_back_out_of_the_running_ones(
    momentum: float | None, steps: int
) -> None:
    """If each step has the same batch, its statistics are recovered.

    The momentum does not matter.
    """
    layer = nn.BatchNorm1d(3, momentum=momentum).double()
    found = []
    batch = torch.randn(16, 3, dtype=torch.float64) * 2 + 1
    for batches in (
        [torch.randn(16, 3, dtype=torch.float64) for _ in range(4)],
        [batch] * steps,
    ):
        for one in batches:
            layer(one)
        found.append({name: value.clone() for name, value in layer.named_buffers()})
    before, after = (
        Statistics(state["running_mean"], state["running_var"]) for state in found
    )
    w = weight(momentum, *(state["num_batches_tracked"] for state in found))
    local = local_statistics(before, after, w)
    torch.testing.assert_close(local.mean, batch.mean(0), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(local.variance, batch.var(0), rtol=1e-10, atol=1e-10)


def test_a_clients_variance_is_at_least_0() -> None:
    """The running variance may fall by more than its weight in the round allows."""
    before, after = (
        Statistics(torch.zeros(2), torch.tensor(v)) for v in ((1.0, 1.0), (0.1, 0.95))
    )
    local = local_statistics(before, after, 0.1)
    torch.testing.assert_close(local.variance, torch.tensor([0.0, 0.5]))


def test_weight_of_a_layer_that_did_not_track_or_does_not_count() -> None:
    five, none = torch.tensor(5), torch.tensor(0)
    assert (
        weight(0.1, five, five)
        == weight(None, five, five)
        == weight(None, none, none)
        == 0
    )
    assert weight(0.1, None, torch.tensor(3)) == 1


def test_synchronised_clients_see_the_same_statistics(
    tmp_path: Path, quick_config
) -> None:
    """Under FedTAN with one step, each client's statistics are the union's."""
    config = quick_config(
        strategy="fedtan", **{"local-steps": 1, "num-server-rounds": 3}
    )
    run(config, tmp_path / "run", workers=0)
    lines = read_metrics(tmp_path / "run" / STATISTICS_FILE)
    assert [line["round"] for line in lines] == [1, 3], "the first round, and the last"
    for line in lines:
        distances = line["layers"]["norm"]["clients"]["l1"]
        assert distances == pytest.approx([distances[0]] * 3, rel=1e-4)


def test_ever_fewer_rounds_have_a_line() -> None:
    assert sorted(rounds_with_statistics(1234)) == [
        1,
        *range(10, 100, 10),
        *range(100, 1000, 100),
        1000,
        1234,
    ]


@pytest.mark.parametrize(
    "settings",
    [{"strategy": "fedbn"}, {"norm": "group"}, {"dp": "server"}],
)
def test_a_server_that_sees_no_statistics_of_single_clients_writes_none(
    settings: dict[str, Any], tmp_path: Path, quick_config
) -> None:
    run(
        quick_config(**{"num-server-rounds": 1, **settings}),
        tmp_path / "run",
        workers=0,
    )
    assert not (tmp_path / "run" / STATISTICS_FILE).exists()


def test_the_lines_tell_of_clients_until_batchnorm_is_frozen(
    tmp_path: Path, quick_config
) -> None:
    """test_resume.py tests the lines of an interrupted run."""
    run(quick_config(**FIXBN), tmp_path, workers=0)
    lines = read_metrics(tmp_path / STATISTICS_FILE)
    assert [(line["round"], line["phase"]) for line in lines] == [
        (1, "train"),
        (10, "frozen"),
        (11, "frozen"),
    ]
    first, last = lines[0]["layers"]["norm"], lines[-1]["layers"]["norm"]
    assert min(*first["clients"]["l1"], first["change"]["l1"]) > 0
    assert last["clients"] == {
        "l1": [None] * 3,
        "mean": [None] * 3,
        "variance": [None] * 3,
    }
    assert last["change"] == {"l1": 0, "mean": 0, "variance": 0}

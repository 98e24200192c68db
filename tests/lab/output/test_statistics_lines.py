"""The lines of ``statistics.jsonl``: distances against a plain oracle, and the batch statistics behind running ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedbn_flwr.doctor.by_batch import Statistics, distance
from fedbn_flwr.doctor.pictures import pictures
from fedbn_flwr.lab.output.statistics_lines import (
    MAX_CLIENTS,
    _rolling,
    sample,
    statistics_line,
    tracked_layers,
    trends,
    weight,
)


def test_distances_against_plain_python() -> None:
    mean, var, other, var_2, eps = [1.0, -2.0], [4.0, 0.25], [1.5, -1.0], [1.0, 0.5], 1e-5
    found = distance(
        Statistics(torch.tensor(other), torch.tensor(var_2)), Statistics(torch.tensor(mean), torch.tensor(var)), eps
    )
    assert found.l1 == pytest.approx(0.5 + 1.0 + 3.0 + 0.25)
    assert found.mean == pytest.approx((0.5 / math.sqrt(4 + eps) + 1 / math.sqrt(0.25 + eps)) / 2)
    assert found.variance == pytest.approx((math.log((4 + eps) / (1 + eps)) + math.log((0.5 + eps) / (0.25 + eps))) / 2)


def _trained(model: nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model.train()
    for batch in batches:
        model(batch)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("momentum", [0.1, 0.01, None])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_batch_statistics_come_back_out_of_the_running_ones(momentum: float | None, steps: int) -> None:
    """Equal batches in every step: the recovered statistics are those of the batch, whatever the momentum."""
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum)).double()
    start = _trained(model, [torch.randn(16, 3, dtype=torch.float64) for _ in range(4)])
    batch = torch.randn(16, 3, dtype=torch.float64) * 2 + 1
    reply = _trained(model, [batch] * steps)
    line = statistics_line(tracked_layers(model), start, start, [("7", reply)])
    layer = line["layers"]["0"]
    assert line["clients"] == ["7"]
    assert layer["sample"]["mean"][0] == pytest.approx(batch.mean(0).tolist(), rel=1e-5)
    assert layer["sample"]["variance"][0] == pytest.approx(batch.var(0).tolist(), rel=1e-5)
    sent = Statistics(start["0.running_mean"], start["0.running_var"])
    expected = distance(Statistics(batch.mean(0), batch.var(0)), sent, 1e-5)
    assert [layer["clients"][name][0] for name in ("l1", "mean", "variance")] == pytest.approx(expected, rel=1e-5)
    assert layer["change"] == {"l1": 0, "mean": 0, "variance": 0}


def test_weight_of_a_layer_that_did_not_track_or_does_not_count() -> None:
    assert weight(0.1, 5, 5) == weight(None, 5, 5) == weight(None, 0, 0) == 0
    assert weight(0.1, None, 3) == 1


def test_a_frozen_round_has_no_local_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6))
    state = model.state_dict()
    layer = statistics_line(tracked_layers(model), state, state, [("0", state)])["layers"]["0"]
    assert layer["clients"] == {"l1": [None], "mean": [None], "variance": [None], "weight": [0]}
    assert layer["sample"] == {"channels": sample(6), "mean": [None], "variance": [None]}


def test_many_clients_are_quantiles_and_unsent_layers_are_left_out() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    state = model.state_dict()
    first = {name: value for name, value in state.items() if name.startswith("0.")}
    replies = []
    for index in range(MAX_CLIENTS + 1):
        moved = first["0.running_mean"] + index, first["0.num_batches_tracked"] + 1
        replies.append((str(index), {**first, "0.running_mean": moved[0], "0.num_batches_tracked": moved[1]}))
    line = statistics_line(tracked_layers(model), state, state, replies)
    assert (line["num-clients"], line["clients"], list(line["layers"])) == (MAX_CLIENTS + 1, None, ["0"])
    layer = line["layers"]["0"]
    assert layer.keys() == {"change", "quantiles"}
    assert layer["quantiles"]["l1"] == pytest.approx([0, 320, 640, 960, 1280])  # 2 channels, w = 0.1
    json.dumps(line, allow_nan=False)


def test_trends_over_recorded_lines_against_numpy() -> None:
    """Two layers, two clients; client b is absent from the second line, and nothing is tracked in the last."""
    rng = np.random.default_rng(0)

    def line(server_round: int, clients: list[str], tracked: bool = True) -> dict[str, Any]:
        def layer(channels: list[int]) -> dict[str, Any]:
            count = len(clients)
            sampled = [[rng.random(len(channels)).tolist() if tracked else None for _ in clients] for _ in range(2)]
            return {
                "change": {"l1": server_round / 10, "mean": 0.0, "variance": 0.0},
                "clients": {"l1": [float(rng.random()) if tracked else None for _ in range(count)]},
                "sample": {"channels": channels, "mean": sampled[0], "variance": sampled[1]},
            }

        return {"round": server_round, "clients": clients, "layers": {"0": layer([0, 1]), "1": layer([0])}}

    lines = [line(1, ["a", "b"]), line(2, ["a"]), line(3, ["a", "b"]), line(4, ["a", "b"], tracked=False)]
    found = trends(lines, window=2)
    assert found["rounds"] == [1, 2, 3, 4]
    assert found["change-l1"] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    sums = [sum(layer["clients"]["l1"][0] for layer in one["layers"].values()) for one in lines[:3]]
    assert found["local-l1"]["a"] == pytest.approx([*sums, None])
    assert [value is None for value in found["local-l1"]["b"]] == [False, True, False, True]
    rows = [
        [v for layer in one["layers"].values() for name in ("mean", "variance") for v in layer["sample"][name][0]]
        for one in lines[:3]
    ]
    expected = [None, *(float(np.var(rows[k : k + 2], axis=0, ddof=1).mean()) for k in range(2)), None]
    assert found["window-variance"]["a"] == pytest.approx(expected)
    assert [value is None for value in found["window-variance"]["b"]] == [True, True, False, True]
    assert found["delta-variance"]["a"][1] == pytest.approx(float(np.var(sums[:2], ddof=1)))
    lines[1]["layers"]["1"]["clients"]["l1"][0] = lines[2]["layers"]["0"]["change"]["l1"] = None
    found = trends(lines, window=2)
    assert found["local-l1"]["a"] == pytest.approx([sums[0], None, sums[2], None]), "a sum of fewer layers is no fall"
    assert found["change-l1"] == pytest.approx([0.2, 0.4, None, 0.8])
    assert found["layers"]["0"]["change-l1"] == [0.1, 0.2, None, 0.4]
    assert found["layers"]["1"]["local-l1"]["a"][1] is found["layers"]["1"]["local-l1"]["b"][1] is None
    assert found["layers"]["1"]["local-l1"]["b"][2] == lines[2]["layers"]["1"]["clients"]["l1"][1]
    for one in lines:  # a layer that never tracks is no layer of the sum
        one["layers"]["1"]["clients"]["l1"] = [None] * len(one["clients"])
    assert trends(lines)["local-l1"]["a"] == [one["layers"]["0"]["clients"]["l1"][0] for one in lines]


class Counted(list[Any]):
    """A list that counts how many of its items were read."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.reads += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.reads += 1
            yield item


def test_a_window_reads_each_line_once_however_long_the_run_is() -> None:
    """3,200 lines that each read all before them took seconds for each client."""
    rows = Counted([[float(at % 7)] if at % 3 else None for at in range(200)])
    found = _rolling(rows, window=5)
    assert rows.reads <= 2 * len(rows)
    last = [row for row in rows if row is not None][-5:]
    assert found[-1] == pytest.approx(float(np.var(last, ddof=1)))
    assert [value is None for value in found[:5]] == [True, True, False, True, False]


def test_a_run_in_which_no_layer_tracks_has_a_picture() -> None:
    found = trends([{"round": 1, "clients": ["a"], "layers": {}}, {"round": 2, "clients": ["a"], "layers": {}}])
    assert found["layers"] == {}
    assert list(pictures({"history": found})) == ["history.png"]

"""``watch-statistics``: the server writes what BatchNorm does in each round, and changes nothing of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config, why_not_watched
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.output.folder import STATISTICS_FILE
from fedbn_flwr.lab.output.run_notes import StatisticsLog
from fedbn_flwr.lab.runs.run import run

FIXBN = {"strategy": "fixbn", "freeze-at": 3, "num-server-rounds": 6, "checkpoint-every": 2, "watch-statistics": 1}


def test_a_resumed_run_has_the_same_lines_and_the_run_the_same_bits(tmp_path: Path, quick_config) -> None:
    class Cut(Exception):
        pass

    def cut(line: Any) -> None:
        if line["round"] == 5:
            raise Cut

    whole = run(quick_config(**FIXBN), tmp_path / "whole", workers=0)
    plain = run(quick_config(**{**FIXBN, "watch-statistics": 0}), tmp_path / "plain", workers=0)
    with pytest.raises(Cut):
        run(quick_config(**FIXBN), tmp_path / "cut", on_round=cut, workers=0)
    run(quick_config(**FIXBN, resume=True), tmp_path / "cut", workers=0)
    assert whole["sha256"] == plain["sha256"]
    assert not (tmp_path / "plain" / STATISTICS_FILE).exists()
    written = tmp_path / "whole" / STATISTICS_FILE
    assert (tmp_path / "cut" / STATISTICS_FILE).read_bytes() == written.read_bytes()

    lines = read_metrics(written)
    assert [(line["round"], line["phase"]) for line in lines] == [
        *[(n, "train") for n in (1, 2, 3)],
        *[(n, "frozen") for n in (4, 5, 6)],
    ]
    first, last = lines[0]["layers"]["norm"], lines[-1]["layers"]["norm"]
    assert first["clients"]["weight"] == pytest.approx([1 - 0.9**2] * 3)  # two steps
    assert all(value > 0 for value in [*first["clients"]["l1"], first["change"]["l1"]])
    assert last["clients"]["l1"] == [None] * 3
    assert last["change"] == {"l1": 0, "mean": 0, "variance": 0}


def test_synchronised_clients_see_the_same_statistics(tmp_path: Path, quick_config) -> None:
    """FedTAN with one step: every client's batch statistics are those of the union."""
    config = quick_config(strategy="fedtan", **{"local-steps": 1, "num-server-rounds": 3, "watch-statistics": 2})
    run(config, tmp_path / "run", workers=0)
    lines = read_metrics(tmp_path / "run" / STATISTICS_FILE)
    assert [line["round"] for line in lines] == [2, 3], "every second round, and the last"
    for line in lines:
        distances = line["layers"]["norm"]["clients"]["l1"]
        assert distances == pytest.approx([distances[0]] * 3, rel=1e-4)


def test_statistics_that_stay_with_the_clients_cannot_be_watched() -> None:
    with pytest.raises(ConfigError, match="watch-statistics=1 has no effect: fedbn keeps the statistics"):
        Config.make({"strategy": "fedbn", "watch-statistics": 1})
    with pytest.raises(ConfigError, match="watch-statistics=1 has no effect: it is for norm=batch"):
        Config.make({"norm": "group", "watch-statistics": 1})


def test_by_default_ever_fewer_rounds_are_recorded_where_statistics_are_sent(tmp_path: Path, quick_config) -> None:
    assert quick_config().watch_statistics == -1
    run(quick_config(**{"num-server-rounds": 22}), tmp_path / "fedavg", workers=0)
    recorded = read_metrics(tmp_path / "fedavg" / STATISTICS_FILE)
    assert [line["round"] for line in recorded] == [1, 10, 20, 22]
    log = StatisticsLog(tmp_path, quick_config(**{"num-server-rounds": 1234}), nn.Identity(), None)  # type: ignore[arg-type]
    due = [number for number in range(1, 1235) if log.is_due(number)]
    assert due == [1, *range(10, 100, 10), *range(100, 1000, 100), 1000, 1234]
    for strategy in ({"strategy": "fedbn"}, {"norm": "group"}, {"dp": "server"}, {"masked-sums": True}):
        assert why_not_watched(Config.make(strategy))
        Config.make({**strategy, "watch-statistics": 0})
    run(quick_config(strategy="fedbn"), tmp_path / "fedbn", workers=0)
    assert not (tmp_path / "fedbn" / STATISTICS_FILE).exists()

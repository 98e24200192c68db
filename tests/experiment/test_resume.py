"""A run that was cut goes on from its checkpoint and ends in the bits of the run that was not, for every strategy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedbn_flwr.experiment.config import Config
from fedbn_flwr.experiment.launch import run
from fedbn_flwr.experiment.output import read_metrics
from fedbn_flwr.experiment.run import OnRound
from fedbn_flwr.strategies import STRATEGIES

ROUNDS = 6
BASE: Mapping[str, Any] = {
    **{"num-clients": 3, "num-server-rounds": ROUNDS, "local-steps": 2, "batch-size": 8, "learning-rate": 0.2},
    **{"checkpoint-every": 2, "eval-every": 3, "variance": "pooled", "fedbs-rounds": 2, "fedbs-eps": 9.0},
}
NEEDS = {"fedwon": {"norm": "wsconv", "model": "lenet"}}
AUTO = {"freeze-at": "auto", "fedtan-rounds": "auto", "freeze-window": 4, "freeze-tau": 1e9}  # frozen after round 4
MOMENTUM = {"sgd-momentum": 0.9, "momentum-scope": "local"}
CASES = {
    **{name: {"strategy": name, **NEEDS.get(name, {})} for name in STRATEGIES},
    "fixbn, auto": {"strategy": "fixbn", **AUTO},
    "fedtan2, auto": {"strategy": "fedtan2", **AUTO},
    "local momentum": {"strategy": "fedavg", **MOMENTUM},
    "local momentum beside local parts": {"strategy": "fedbn", **MOMENTUM},
    "global momentum": {"strategy": "silobn", **MOMENTUM, "momentum-scope": "global"},
    "half of the clients": {"strategy": "fedbn", "fraction-train": 0.5, "num-clients": 4},
    "half of the clients, scaffold": {"strategy": "scaffold", "fraction-train": 0.5, "num-clients": 4},
}


class Cut(Exception):
    """The power fails."""


def cut_after(last: int) -> OnRound:
    def on_round(line: Mapping[str, Any]) -> None:
        if line["round"] == last:
            raise Cut

    return on_round


Start = Callable[..., dict[str, Any]]


def start(out: Path, *, cut: int = 0, resume: bool = False, **settings: Any) -> dict[str, Any]:
    config = Config.make({**BASE, **settings, "resume": resume})
    return run(config, out, on_round=cut_after(cut) if cut else None)


def same(cut: Path, whole: Path) -> None:
    """Everything but times and places."""

    def read(out: Path) -> Any:
        summary = json.loads((out / "summary.json").read_text())
        lines = [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(out / "metrics.jsonl")]
        return {k: v for k, v in summary.items() if k not in ("seconds", "resumed-after")}, lines

    assert read(cut) == read(whole)
    models = [load_file(out / "model.safetensors") for out in (cut, whole)]
    assert all(np.array_equal(models[0][name], models[1][name]) for name in models[1])


@pytest.mark.parametrize("case", CASES)
def test_a_cut_run_ends_in_the_bits_of_the_whole_one(case: str, tmp_path: Path) -> None:
    """Cut in round 5, past the checkpoint of round 4 and the client files of round 5; and again in round 3."""
    start(tmp_path / "whole", **CASES[case])
    for last in (3, 5):
        with pytest.raises(Cut):
            start(tmp_path / "cut", cut=last, resume=True, **CASES[case])
        assert [line["round"] for line in read_metrics(tmp_path / "cut/metrics.jsonl")] == list(range(1, last + 1))
    summary = start(tmp_path / "cut", resume=True, **CASES[case])
    assert summary["resumed-after"] == [2, 4]
    same(tmp_path / "cut", tmp_path / "whole")

"""Engine B has the bits of engine A.

A GPU runs every strategy, and Ray each way of using the engine.
"""

from __future__ import annotations

import pytest
import torch

from apps.flower_processes import flower_run
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.strategies import STRATEGIES
from tests.support.checkout import ROOT, copied
from tests.support.every_key import FEDWON
from tests.support.fast import fast
from tests.support.runs import QUICK, state_of, summary_of, values_of

# A fake GPU computes on the CPU, so a method of each kind is enough for it. The suite
# has one without and one with exchanges in the steps.
FAKE = ("fedavg", "scaffold", "fixbn", "fedtan2", "fedrep")
GPU = [
    *fast([(name, "fake") for name in FAKE], ("fedavg", "fake"), ("fedtan2", "fake")),
    *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in STRATEGIES),
]


@pytest.mark.parametrize(("strategy", "gpu"), GPU, indirect=["gpu"])
def test_every_strategy_ends_on_a_gpu_where_it_ends_on_the_cpu(
    strategy: str, tmp_path, gpu
) -> None:
    settings = {
        **QUICK,
        "model": "lenet",
        "num-clients": 2,
        "eval-every": 2,
        # both phases of each
        "fedtan-rounds": 1,
        "freeze-at": 1,
        # The first step of FedAdagrad is nearly the sign of each entry, and rounding
        # decides on those near 0, so keep the steps small.
        "server-learning-rate": 1e-3,
    }
    ended, own = [], {**{"fedwon": FEDWON}.get(strategy, {}), "strategy": strategy}
    for device in ("cpu", gpu.type):
        config, _ = Config.make_of_shared(settings, {**own, "device": device})
        assert run(config, tmp_path / device)["rejected"] == 0
        ended.append(state_of(tmp_path / device))
    assert list(ended[0]) == list(ended[1])
    # The tolerance is as wide as between two CPUs. If rounding turns a ReLU on,
    # FedWon's unit moves by some 2e-4. Training changes 0.01 and more.
    for name, expected in ended[0].items():
        torch.testing.assert_close(ended[1][name], expected, rtol=1e-3, atol=1e-3)


RAY = {
    # Each way of using the engine has one case; the omitted methods send no other kind
    # of message.
    "fedbn": {},  # an entry that stays with the clients
    "fedtan": {"fedtan-transport": "channel"},  # queries
    "fedtan2": {"fedtan-rounds": 1},  # by messages
}


@pytest.mark.simulation
@pytest.mark.xdist_group("ray-matrix")
@pytest.mark.parametrize("strategy", fast(RAY, "fedbn"))
def test_ray_gives_the_bits_of_the_run_in_process(
    strategy: str, tmp_path, monkeypatch, same_run
) -> None:
    settings = {**QUICK, "eval-every": 2, "strategy": strategy, **RAY[strategy]}
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # One process of Ray is enough, unless clients wait for each other.
    at_once = 1 if strategy == "fedbn" else 3
    flower_run(
        copied(tmp_path),
        run_config={**settings, "out": str(tmp_path / "ray")},
        federation_config={
            "num-supernodes": 3,
            "client-resources-num-cpus": 1,
            "init-args-num-cpus": at_once,
        },
    )
    same_run(summary_of(tmp_path / "ray"), run(Config.make(settings), tmp_path / "out"))
    assert values_of(tmp_path / "ray", "participants") == [[0, 1, 2]] * 2

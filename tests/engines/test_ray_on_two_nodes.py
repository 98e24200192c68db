"""Flower's simulation on two Ray nodes has the bits of the run in process.

These are the commands of docs/simulation.md, "On several machines". Both nodes are on
this machine, with one CPU each, so the two actors of the simulation need both.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch import nn

from apps import flower_processes as module
from apps.flower_processes import (
    Process,
    flower_environment,
    flower_run,
    free_port,
)
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.run import run
from tests.support.checkout import ROOT
from tests.support.runs import summary_of

SETTINGS = {
    "strategy": "fedbn",
    "model": f"{__name__}:said",
    "num-clients": 4,
    "num-server-rounds": 2,
    "local-steps": 3,
    "batch-size": 16,
    "eval-on": "personal-own",
}


def said(num_classes: int) -> nn.Module:
    """Return a model, and print a line: Ray shows it with the process."""
    print("the model is built", flush=True)
    layers = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, num_classes)
    return nn.Sequential(nn.Flatten(), *layers)


@pytest.fixture
def cluster(tmp_path) -> Iterator[str]:
    """Start two Ray nodes with one CPU each, and provide their address."""
    address = f"{socket.gethostbyname(socket.gethostname())}:{free_port()}"
    head = ["--head", f"--port={address.rpartition(':')[2]}"]
    env = flower_environment(tmp_path)
    env.pop("RAY_ADDRESS")
    common = ["--num-cpus=1", "--block", "--include-dashboard=false"]
    with ExitStack() as nodes:
        for name, own in {"first": head, "second": [f"--address={address}"]}.items():
            command = ["ray", "start", *own, *common[: 3 if own is head else 2]]
            process = Process(command, env, tmp_path / f"{name}.log")
            nodes.callback(process.end)
            deadline = time.monotonic() + 90
            while "Ray runtime started" not in process.said():
                assert time.monotonic() < deadline, process.said()
                assert process.code is None, process.said()
                time.sleep(0.2)
        yield address


@pytest.mark.slow
@pytest.mark.simulation
def test_two_nodes_give_the_bits_of_the_run_in_process(
    cluster, tmp_path, monkeypatch
) -> None:
    def environment(home: Path) -> Mapping[str, str]:
        # Otherwise Ray shows a line of several actors only once.
        own = {"RAY_ADDRESS": cluster, "RAY_DEDUP_LOGS": "0"}
        return {**flower_environment(home), **own}

    monkeypatch.setattr(module, "flower_environment", environment)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    log = []
    config = {"num-supernodes": 4, "client-resources-num-cpus": 1}
    flower_run(
        ROOT,
        run_config={**SETTINGS, "out": str(tmp_path / "ray")},
        federation_config=config,
        on_line=log.append,
    )
    here = run(Config.make(SETTINGS), tmp_path / "here", workers=0)
    actors = set(re.findall(r"ClientAppActor pid=(\d+)", "\n".join(log)))
    assert len(actors) == 2, "one on each node"
    assert summary_of(tmp_path / "ray")["sha256"] == here["sha256"]

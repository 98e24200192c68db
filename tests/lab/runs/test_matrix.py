"""Engine B has the bits of engine A.

A GPU runs every strategy. Ray runs each way of using the engine, and an app of Flower's
older kind in Flower's own loop.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from apps.flower_processes import flower_run
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.run import preflight, run
from fedbn_flwr.strategies import STRATEGIES
from tests.support import legacy_loop
from tests.support.fast import fast
from tests.support.runs import lines_of, summary_of

ROOT = Path(__file__).parents[3]
Needs = Callable[[str], Mapping[str, Any]]


# A fake GPU computes on the CPU, so a method of each kind is enough for it. The suite
# has one without and one with exchanges in the steps.
FAKE = ("fedavg", "scaffold", "fixbn", "fedtan2", "fedrep")
GPU = [
    *fast([(name, "fake") for name in FAKE], ("fedavg", "fake"), ("fedtan2", "fake")),
    *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in STRATEGIES),
]


@pytest.mark.parametrize(("strategy", "gpu"), GPU, indirect=["gpu"])
def test_every_strategy_ends_on_a_gpu_where_it_ends_on_the_cpu(
    strategy: str, needs: Needs, tmp_path: Path, gpu: torch.device
) -> None:
    settings = {
        "model": "lenet",
        "num-clients": 2,
        "num-server-rounds": 2,
        "local-steps": 2,
        "batch-size": 8,
        "eval-every": 2,
    }
    # both phases of each
    settings |= {
        "fedtan-rounds": 1,
        "freeze-at": 1,
    }
    # The first step of FedAdagrad is nearly the sign of each entry, and rounding decides
    # on those near 0, so keep the steps small.
    settings["server-learning-rate"] = 1e-3
    ended = []
    for device in ("cpu", gpu.type):
        config, _ = Config.make_of_shared(
            settings, {**needs(strategy), "strategy": strategy, "device": device}
        )
        assert run(config, tmp_path / device)["rejected"] == 0
        ended.append(load_file(tmp_path / device / "model.safetensors"))
    assert list(ended[0]) == list(ended[1])
    # The tolerance is as wide as between two CPUs. If rounding turns a ReLU on,
    # FedWon's unit moves by some 2e-4. Training changes 0.01 and more.
    for name, expected in ended[0].items():
        torch.testing.assert_close(ended[1][name], expected, rtol=1e-3, atol=1e-3)


RAY: Mapping[str, Mapping[str, Any]] = {
    # Each way of using the engine has one case; the omitted methods send no other kind
    # of message.
    "fedbn": {"strategy": "fedbn"},  # an entry that stays with the clients
    # queries
    "fedtan": {"strategy": "fedtan", "fedtan-transport": "channel"},
    "fedtan2": {"strategy": "fedtan2"},  # by messages
}

# Ray runs all cases one after another in a single run of Flower, because its start
# takes most of the time.

APP = '''
"""Serves each config of a folder in turn, and then another app; the file "current" tells the clients which."""

import json
import traceback
from pathlib import Path

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedbn_flwr.client import client_app
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.serve import serve
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.node import client_fn
from numpyclient import client_app as other_client, server_app as other_server

answer = client_app(client_fn)


class Current(ClientApp):
    """Answers under the current config; what a node kept under another is forgotten."""

    def __call__(self, message, context):
        folder = Path(context.run_config["folder"])
        name = (folder / "current").read_text()
        if "current" not in context.state or context.state["current"]["name"] != name:
            context.state = RecordDict({"current": ConfigRecord({"name": name})})
        settings = json.loads((folder / f"{name}.json").read_text())
        own = Context(context.run_id, context.node_id, context.node_config, context.state, settings)
        reply = (other_client.app if name == "numpyclient" else answer)(message, own)
        context.state = own.state
        return reply


clients = Current()
server = ServerApp()


@server.main()
def main(grid, context):
    folder = Path(context.run_config["folder"])
    for path in sorted(folder.glob("*.json")):
        (folder / "current").write_text(path.stem)
        try:
            if path.stem == "numpyclient":
                settings = json.loads(path.read_text())
                other_server.app(grid, Context(context.run_id, context.node_id, {}, RecordDict(), settings))
                continue
            serve(grid, checked_config(Config.make(json.loads(path.read_text()), complete=True)), folder / path.stem)
        except Exception:
            (folder / f"{path.stem}.error").write_text(traceback.format_exc())
'''

PYPROJECT = """
[project]
name = "matrix"
version = "1.0.0"
description = "every strategy in one run"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedbn"

[tool.flwr.app.components]
serverapp = "matrix_app:server"
clientapp = "matrix_app:clients"

[tool.flwr.app.config]
folder = ""
"""


OF_BITS = "test_ray_gives_the_bits_of_the_run_in_process"
OF_LEGACY = "test_ray_gives_the_numbers_of_flowers_legacy_loop_in_process"


@pytest.fixture(scope="module")
def ray_runs(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """The folder with ``NAME.json`` and results ``NAME/`` of each case to be tested.

    ``log`` is Flower's. One case needs one process of Ray.
    """
    wanted = {item.name for item in request.session.items}
    app, folder = tmp_path_factory.mktemp("app"), tmp_path_factory.mktemp("ray")
    (app / "matrix_app.py").write_text(APP)
    (app / "pyproject.toml").write_text(PYPROJECT)
    short = {
        "num-clients": 3,
        "num-server-rounds": 2,
        "eval-every": 2,
        "local-steps": 3,
        "batch-size": 16,
    }
    cases = [name for name in RAY if f"{OF_BITS}[{name}]" in wanted]
    for name in cases:
        own = RAY[name]
        shared = {**short, "freeze-at": 1, "fedtan-rounds": 1}
        given, _ = Config.make_of_shared(shared, own)
        config = preflight(given, folder / name).config
        (folder / f"{name}.json").write_text(json.dumps(config.to_mapping()))
    if OF_LEGACY in wanted:
        settings = json.dumps(legacy_loop.settings("fedbn"))
        (folder / "numpyclient.json").write_text(settings)
    lines: list[str] = []
    federation = {
        "num-supernodes": legacy_loop.NODES,
        "client-resources-num-cpus": 1,
        "init-args-num-cpus": 1 if cases == ["fedbn"] else 3,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        paths = (str(ROOT), str(legacy_loop.APP), os.environ.get("PYTHONPATH", ""))
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        flower_run(
            app,
            run_config={"folder": str(folder)},
            federation_config=federation,
            on_line=lines.append,
        )
    (folder / "log").write_text("\n".join(lines))
    return folder


@pytest.mark.simulation
@pytest.mark.xdist_group("ray-matrix")  # one process, and therefore one run of Flower
@pytest.mark.parametrize("case", fast(RAY, "fedbn"))
def test_ray_gives_the_bits_of_the_run_in_process(
    case: str, ray_runs: Path, tmp_path: Path, same_run
) -> None:
    error = ray_runs / f"{case}.error"
    assert not error.exists(), error.read_text()
    summary = summary_of(ray_runs / case)
    config = Config.make(
        json.loads((ray_runs / f"{case}.json").read_text()), complete=True
    )
    here = run(config, tmp_path / "out")
    same_run(summary, here)
    lines = lines_of(ray_runs / case)
    assert [(line["round"], line["participants"]) for line in lines] == [
        (1, [0, 1, 2]),
        (2, [0, 1, 2]),
    ]


@pytest.mark.slow
@pytest.mark.simulation
@pytest.mark.xdist_group("ray-matrix")
def test_ray_gives_the_numbers_of_flowers_legacy_loop_in_process(
    ray_runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This is the NumPyClient project."""
    error = ray_runs / "numpyclient.error"
    assert not error.exists(), error.read_text()
    found = legacy_loop.accuracies((ray_runs / "log").read_text().splitlines())
    with legacy_loop.imported(tmp_path, monkeypatch) as project:
        assert found == legacy_loop.in_process(project, caplog, "fedbn")

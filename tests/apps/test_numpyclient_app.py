"""The NumPyClient project, in process and through ``flwr run``: our strategies in Flower's legacy loop."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.engines.flower_run import flower_run
from tests.support.bundles import unpacked

APP = Path(__file__).parents[2] / "apps/numpyclient"
NODES, ROUNDS = 3, 3


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The project's ServerApp and ClientApp, imported as Flower does: from the project's bundle."""
    monkeypatch.syspath_prepend(str(unpacked(APP, tmp_path / "bundle")))
    yield tuple(importlib.import_module(f"numpyclient.{name}").app for name in ("server_app", "client_app"))  # type: ignore[misc]
    for name in [name for name in sys.modules if name.split(".")[0] == "numpyclient"]:
        del sys.modules[name]


def in_process(project: tuple[Any, Any], caplog: pytest.LogCaptureFixture, strategy: str) -> list[float]:
    """Return the accuracy after each round."""
    server_app, client_app = project
    config = {"strategy": strategy, "num-server-rounds": ROUNDS, "learning-rate": 0.05}
    with InProcessGrid(client_app, NODES, run_config=config) as grid, caplog.at_level("INFO", "flwr"):
        caplog.clear()
        server_app(grid, Context(0, 0, {}, RecordDict(), config))
    return accuracies([record.getMessage() for record in caplog.records])


def accuracies(lines: list[str]) -> list[float]:
    """Return the accuracies of the history that Flower's loop logs at its end."""
    (found,) = re.findall(r"'accuracy': \[(.*?)\]", " ".join(" ".join(lines).replace("INFO :", " ").split()))
    return [float(value) for value in re.findall(r"\(\d+, ([\d.]+)\)", found)]


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedadam", "fedbn", "silobn", "mtfl", "standalone"])
def test_the_app_learns_in_process(strategy: str, project, caplog) -> None:
    found = in_process(project, caplog, strategy)
    assert len(found) == ROUNDS
    assert found[-1] > 0.5


@pytest.mark.simulation
@pytest.mark.xdist_group("simulation")
@pytest.mark.parametrize("strategy", [pytest.param("fedadam", marks=pytest.mark.slow), "fedbn"])
def test_flwr_run_gives_the_same_numbers(strategy: str, project, caplog) -> None:
    lines: list[str] = []
    flower_run(
        APP,
        run_config={"num-server-rounds": ROUNDS, "strategy": strategy},
        federation_config={"num-supernodes": NODES, "client-resources-num-cpus": 1},
        on_line=lines.append,
    )
    assert accuracies(lines) == in_process(project, caplog, strategy)

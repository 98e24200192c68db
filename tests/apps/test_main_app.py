"""The default app has its entry points, and the demo's table and exit code."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from apps.main import demo as module
from fedbn_flwr.errors import EngineError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.studies.check_study import load_study
from fedbn_flwr.lab.studies.study import Study
from tests.support.checkout import PYPROJECT, ROOT


def test_the_toml_names_both_components() -> None:
    components = PYPROJECT["tool"]["flwr"]["app"]["components"]
    kinds = {"serverapp": ServerApp, "clientapp": ClientApp}
    assert components.keys() == kinds.keys()
    for name, kind in kinds.items():
        path, attribute = components[name].split(":")
        assert isinstance(getattr(importlib.import_module(path), attribute), kind)


# These tests use short runs, and replace Flower's part by a run in this process.


class AtOnce(Executor):
    """An executor that does its work when it receives it.

    The runs share this process and seed its generators.
    """

    def __init__(self, workers: int) -> None: ...

    def submit(self, work: Callable, /, *arguments: Any, **_: Any) -> Future:
        done = Future()
        try:
            done.set_result(work(*arguments))
        except EngineError as error:
            done.set_exception(error)
        return done


@pytest.fixture
def short_demo(monkeypatch) -> dict:
    """Make ``flower_run`` execute the run in this process with its settings.

    Tests change these settings through ``seen["change"]``.
    """
    seen = {"change": {}}

    def short(path: Path) -> Study:
        seen["study"] = path
        return load_study(
            path, ["num-server-rounds=2", "local-steps=1", "eval-every=1"]
        )

    def flower_run(
        app: Path, *, run_config: Any, federation_config: Any, on_line: Any
    ) -> None:
        seen.update(app=app, federation=federation_config)
        nodes = {"num-clients": federation_config["num-supernodes"]}
        settings = {key: value for key, value in run_config.items() if key != "out"}
        run(
            Config.make({**settings, **nodes, **seen["change"]}),
            Path(run_config["out"]),
        )
        on_line("INFO :      round 2/2: test-accuracy 0.5 train-loss 1.0")

    monkeypatch.setattr(module, "load_study", short)
    monkeypatch.setattr(module, "flower_run", flower_run)
    monkeypatch.setattr(module, "ThreadPoolExecutor", AtOnce)
    return seen


def test_the_demo_ends_with_a_table_and_fails_where_the_engines_differ(
    short_demo, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "demo"
    assert module.demo(out) == 0
    assert short_demo["app"] == ROOT
    assert short_demo["study"] == ROOT / "apps/main/recipes/demo.yaml"
    assert short_demo["federation"] == {
        "num-supernodes": 5,
        "client-resources-num-cpus": 1,
    }
    said = capsys.readouterr().out
    for method in (
        "FedAvg+BN (flwr run)",
        "FedAvg+BN",
        "FedAvg+GN",
        "FixBN",
        "FedTAN",
        "one machine",
    ):
        assert method in said
    for column in ("accuracy, %", "rounds", "exchanges", "MB of floats"):
        assert column in said
    accuracy = dict(re.findall(r"│ (\S[^│]*?) +│ +([\d.]+) +│", said))
    behind = float(accuracy["one machine"]) - float(accuracy["FedTAN"])
    (shown,) = re.findall(r"behind one machine, in points: .*FedTAN (-?[\d.]+)", said)
    assert abs(float(shown) - behind) < 0.06, "both are rounded"
    assert "flwr run and in process end in the same bits: yes" in said
    for line in said.splitlines()[-2:]:
        assert Path(line.strip()).is_file(), "the paths of the results come last"

    # The sweep has its runs already. The engines differ if Flower's has another seed.
    shutil.rmtree(out / "flwr-run")
    short_demo["change"] = {"seed": 7}
    assert module.demo(out) == 1
    assert "the same bits: NO" in capsys.readouterr().out

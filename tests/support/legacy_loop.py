"""``apps/numpyclient`` runs our strategy in Flower's legacy loop."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedbn_flwr.engines import InProcessGrid
from tests.support.bundles import unpacked

APP = Path(__file__).parents[2] / "apps/numpyclient"
NODES, ROUNDS = 3, 3


def settings(strategy: str) -> dict[str, Any]:
    """The project's run config."""
    return {"strategy": strategy, "num-server-rounds": ROUNDS, "learning-rate": 0.05}


@contextmanager
def imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any]]:
    """Yield the project's ServerApp and ClientApp from its bundle.

    Flower imports them in this way.
    """
    monkeypatch.syspath_prepend(str(unpacked(APP, folder / "bundle")))
    yield tuple(
        importlib.import_module(f"numpyclient.{name}").app
        for name in ("server_app", "client_app")
    )
    for name in [name for name in sys.modules if name.split(".")[0] == "numpyclient"]:
        del sys.modules[name]


def in_process(
    project: tuple[Any, Any], caplog: pytest.LogCaptureFixture, strategy: str
) -> list[float]:
    """Return the accuracy after each round."""
    server_app, client_app = project
    config = settings(strategy)
    with (
        InProcessGrid(client_app, NODES, run_config=config) as grid,
        caplog.at_level("INFO", "flwr"),
    ):
        caplog.clear()
        server_app(grid, Context(0, 0, {}, RecordDict(), config))
    return accuracies([record.getMessage() for record in caplog.records])


def accuracies(lines: list[str]) -> list[float]:
    """Return the accuracies of the history that Flower's loop logs at its end."""
    (found,) = re.findall(
        r"'accuracy': \[(.*?)\]",
        " ".join(" ".join(lines).replace("INFO :", " ").split()),
    )
    return [float(value) for value in re.findall(r"\(\d+, ([\d.]+)\)", found)]

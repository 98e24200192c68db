"""The NumPyClient project runs in process.

It uses our strategies in Flower's legacy loop.
"""

from __future__ import annotations

import importlib
import re
import sys

import pytest
from flwr.app import Context, RecordDict

from fedbn_flwr.engines import InProcessGrid
from tests.support.bundles import unpacked
from tests.support.checkout import ROOT
from tests.support.fast import fast

NODES, ROUNDS = 3, 3


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Provide the ServerApp and ClientApp of the bundle, imported as Flower does."""
    bundle = unpacked(ROOT / "apps/numpyclient", tmp_path / "bundle")
    monkeypatch.syspath_prepend(bundle)
    yield tuple(
        importlib.import_module(f"numpyclient.{name}").app
        for name in ("server_app", "client_app")
    )
    for name in [name for name in sys.modules if name.split(".")[0] == "numpyclient"]:
        del sys.modules[name]


@pytest.mark.parametrize("strategy", fast(["fedavgm", "fedbn", "standalone"], 1))
def test_the_app_learns_in_process(strategy: str, project, caplog) -> None:
    """Flower's loop logs the accuracies of the history at its end."""
    server_app, client_app = project
    config = {
        "strategy": strategy,
        "num-server-rounds": ROUNDS,
        "learning-rate": 0.05,
    }
    with (
        InProcessGrid(client_app, NODES, run_config=config) as grid,
        caplog.at_level("INFO", "flwr"),
    ):
        server_app(grid, Context(0, 0, {}, RecordDict(), config))
    said = " ".join(" ".join(caplog.messages).split())
    (history,) = re.findall(r"'accuracy': \[(.*?)\]", said)
    found = re.findall(r"\(\d+, ([\d.]+)\)", history)
    assert len(found) == ROUNDS
    assert float(found[-1]) > 0.5

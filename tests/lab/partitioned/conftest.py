"""Runs of nodes with configs of their own, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.runs.check_start import check
from fedbn_flwr.lab.runs.node import client_fn
from fedbn_flwr.lab.runs.serve import serve


@pytest.fixture
def served(tmp_path: Path) -> Callable[..., Any]:
    """Provide ``served(config or keys, node_configs, name="out")`` to run nodes.

    It returns the summary and the rounds.
    """

    def do(
        given: Config | Mapping[str, Any],
        nodes: Sequence[dict[str, Any]],
        name: str = "out",
    ) -> Any:
        config = given if isinstance(given, Config) else Config.make(given)
        app = client_app(client_fn)
        with InProcessGrid(
            app, len(nodes), run_config=config.to_mapping(), node_configs=nodes
        ) as grid:
            return serve(grid, check(config), tmp_path / name), read_metrics(
                tmp_path / name / "metrics.jsonl"
            )

    return do

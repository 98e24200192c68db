"""The NumPyClient project runs in process and through ``flwr run``.

It uses our strategies in Flower's legacy loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.engines.flower_run import flower_run
from tests.support.legacy_loop import (
    APP,
    NODES,
    ROUNDS,
    accuracies,
    imported,
    in_process,
)


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any]]:
    with imported(tmp_path, monkeypatch) as apps:
        yield apps


@pytest.mark.parametrize("strategy", ["fedavgm", "fedbn", "standalone"])
def test_the_app_learns_in_process(strategy: str, project, caplog) -> None:
    found = in_process(project, caplog, strategy)
    assert len(found) == ROUNDS
    assert found[-1] > 0.5


# tests/lab/runs/test_matrix.py has this law for fedbn, in its own run of Flower.
@pytest.mark.slow
@pytest.mark.simulation
@pytest.mark.parametrize("strategy", ["fedadam", "fedbn"])
def test_flwr_run_gives_the_same_numbers(strategy: str, project, caplog) -> None:
    lines: list[str] = []
    flower_run(
        APP,
        run_config={"num-server-rounds": ROUNDS, "strategy": strategy},
        federation_config={"num-supernodes": NODES, "client-resources-num-cpus": 1},
        on_line=lines.append,
    )
    assert accuracies(lines) == in_process(project, caplog, strategy)

"""The NumPyClient project runs in process.

It uses our strategies in Flower's legacy loop. tests/lab/runs/test_matrix.py has the
same numbers through ``flwr run``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fast import fast
from tests.support.legacy_loop import (
    ROUNDS,
    imported,
    in_process,
)


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any]]:
    with imported(tmp_path, monkeypatch) as apps:
        yield apps


@pytest.mark.parametrize("strategy", fast(["fedavgm", "fedbn", "standalone"], 1))
def test_the_app_learns_in_process(strategy: str, project, caplog) -> None:
    found = in_process(project, caplog, strategy)
    assert len(found) == ROUNDS
    assert found[-1] > 0.5

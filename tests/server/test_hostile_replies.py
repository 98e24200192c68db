"""One node with drawn replies neither ends a run for all, nor changes it unnoticed."""

from __future__ import annotations

import pytest

from tests.support import hostile
from tests.support.fast import fast


@pytest.mark.parametrize("seed", fast(range(32), *range(0, 32, 3)))
def test_a_run_with_a_hostile_node_keeps_the_law(seed: int) -> None:
    """``python -m tests.support.hostile 1000`` draws more."""
    hostile.check([*hostile.METHODS][seed % len(hostile.METHODS)], seed)


@pytest.mark.slow
def test_a_thousand_runs_with_a_hostile_node_keep_the_law() -> None:
    assert hostile.main(first=0, draws=1000) == 0

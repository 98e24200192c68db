"""Epsilon is that of our own sum and the exact formula, whatever happens to the file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedbn_flwr.privacy.accounting import PrivacyAccountant


def delta_of(epsilon: float, noises: list[float]) -> float:
    """Return delta of composed Gaussian mechanisms, with mu^2 = sum 1 / z^2.

    The formula is Theorem 8 of Balle and Wang (2018).
    """
    mu = math.sqrt(sum(z**-2 for z in noises))
    return float(
        norm.cdf(mu / 2 - epsilon / mu)
        - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    )


MOVES = ("restore", "add", "elsewhere", "save", "killed", "older file")


@settings(max_examples=100, derandomize=True)
@given(
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(MOVES), st.sampled_from([0.0, 1.0, 3.0]), st.integers(0, 99)
        ),
        min_size=8,
        max_size=16,
    ),
)
def test_no_addition_restore_or_crash_lowers_epsilon(
    with_file: bool, moves: list[tuple[str, float, int]]
) -> None:
    """The cost is also not below the cost of any state that is restored."""

    def cost(releases: Sequence[float]) -> float:
        return sum(z**-2 if z else math.inf for z in releases)

    with TemporaryDirectory() as folder:
        file = Path(folder) / "privacy.jsonl" if with_file else None
        own, saved, least = PrivacyAccountant(1e-5, file), [list[float]()], 0.0
        for move, z, which in moves:
            # The newest states are drawn most often.
            state = saved[-1 - min(which // 30, len(saved) - 1)]
            lines = file.read_text() if file and file.exists() else ""
            if move == "add":
                own.add(z)
                least += cost([z])
            elif move == "save":
                saved.append([*own.releases])
            elif move == "elsewhere":  # another process continues from a checkpoint
                saved.append([*state, z])
            elif move == "restore":
                own.restore(state)
                least = max(least, cost(state))
            elif file and move == "killed":  # in a write, so its result was never used
                file.write_text(f'{lines}{{"noise-multip')
                own = PrivacyAccountant(1e-5, file)
                own.restore(())
            elif file:  # a backup replaces the file of a process that continues
                file.write_text("".join(lines.splitlines(True)[: which % 4]))
                own.restore(())
            assert cost(own.releases) >= least
            least = cost(own.releases)
            if lines:
                reopened = PrivacyAccountant(1e-5, file)
                reopened.restore(())
                assert reopened.releases == own.releases
        if 0.0 < least < math.inf:
            found = delta_of(own.epsilon(), own.releases)
            assert found == pytest.approx(1e-5, rel=1e-6)
        else:
            assert own.epsilon() == least

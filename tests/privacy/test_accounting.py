"""Epsilon equals our own sums and the library's other accountants."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import pld
from scipy.stats import norm

from fedbn_flwr.errors import ConfigError
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


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(
        ConfigError, match=r'not installed: pip install "\.\[privacy\]"'
    ):
        PrivacyAccountant(1e-5, releases=[1.0]).epsilon()


@pytest.mark.parametrize("noises", [[0.7], [4.0] * 3, [0.5, 2.0, 4.0, 4.0]])
def test_epsilon_is_that_of_the_analytic_gaussian_and_of_a_second_accountant(
    noises: list[float],
) -> None:
    accountant = PrivacyAccountant(1e-5, releases=noises)
    epsilon = accountant.epsilon()
    assert delta_of(epsilon, noises) == pytest.approx(1e-5, rel=1e-6)
    second = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for z in dict.fromkeys(noises):
        second.compose(dp_accounting.GaussianDpEvent(z), noises.count(z))
    assert epsilon == pytest.approx(second.get_epsilon(1e-5), rel=2e-3)


def test_a_release_without_noise_has_no_epsilon() -> None:
    assert PrivacyAccountant(1e-5).epsilon() == 0
    assert PrivacyAccountant(1e-5, releases=[1.0, 0.0]).epsilon() == math.inf


def test_the_noise_for_an_epsilon_is_the_smallest() -> None:
    accountant = PrivacyAccountant(1e-5)
    z = accountant.noise_for(3.0, 20)
    assert accountant.epsilon([z] * 20) <= 3.0 < accountant.epsilon([0.998 * z] * 20)
    with pytest.raises(ConfigError, match="dp-target-epsilon=1e-06 over 1000 rounds"):
        accountant.noise_for(1e-6, 1000)


def test_releases_outlive_a_crash(tmp_path: Path) -> None:
    file = tmp_path / "privacy.jsonl"
    first = PrivacyAccountant(1e-5, file=file)
    for z in (1.0, 2.0):
        first.add(z)
    with file.open("a") as lines:
        # The run was killed during a write, so the result of this release was never
        # used.
        lines.write('{"noise-multip')
    second = PrivacyAccountant(1e-5, file=file)
    second.restore([1.0])  # from an older checkpoint
    assert second.releases == [1.0, 2.0]
    second.add(3.0)
    third = PrivacyAccountant(1e-5, file=file)
    third.restore(())
    assert third.releases == second.releases
    # a copy of an older file
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    third.restore(second.releases)
    assert third.releases == second.releases
    assert len(file.read_text().splitlines()) == 3

"""Epsilon against computations of one's own, and against the library's other accountants."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import pld
from scipy.stats import norm

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.privacy.accounting import PrivacyAccountant, Release


def delta_of(epsilon: float, noises: list[float]) -> float:
    """Delta of composed Gaussian mechanisms (Balle and Wang 2018, Theorem 8, with mu^2 = sum 1 / z^2)."""
    mu = math.sqrt(sum(z**-2 for z in noises))
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r'not installed; pip install "fedbn-flwr\[privacy\]"'):
        PrivacyAccountant(1e-5, "zero-out", releases=[Release(1.0, 8, 8)]).epsilon()


@pytest.mark.parametrize("noises", [[0.7], [4.0] * 3, [0.5, 2.0, 4.0, 4.0]])
def test_epsilon_is_that_of_the_analytic_gaussian_and_of_a_second_accountant(noises: list[float]) -> None:
    accountant = PrivacyAccountant(1e-5, "zero-out", releases=[Release(z, 8, 8) for z in noises])
    epsilon = accountant.epsilon()
    assert delta_of(epsilon, noises) == pytest.approx(1e-5, rel=1e-6)
    second = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for z in dict.fromkeys(noises):
        second.compose(dp_accounting.GaussianDpEvent(z), noises.count(z))
    assert epsilon == pytest.approx(second.get_epsilon(1e-5), rel=2e-3)


def test_another_client_s_data_costs_twice_the_change() -> None:
    halved = PrivacyAccountant(1e-5, "zero-out", releases=[Release(0.5, 8, 8)] * 5).epsilon()
    assert PrivacyAccountant(1e-5, "replace-one", releases=[Release(1.0, 4, 8)] * 5).epsilon() == halved
    assert PrivacyAccountant(1e-5, "zero-out", releases=[Release(0.5, 4, 8)] * 5).epsilon() == halved


def test_secret_samples_cost_less_and_never_less_than_samples_of_the_removed_client_alone() -> None:
    """The bound for m of n lies between that of Poisson sampling at half the change and that without sampling."""
    known, secret = (
        PrivacyAccountant(1e-5, "replace-one", releases=[Release(4.0, 10, 1000, hidden)] * 50).epsilon()
        for hidden in (False, True)
    )
    poisson = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    poisson.compose(dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(4.0)), 50)
    assert poisson.get_epsilon(1e-5) < secret < known / 5
    # the library takes the noise in units of the whole change, which is 2 C
    wrong = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, dp_accounting.GaussianDpEvent(4.0))
    wrong.compose(event, 50)
    assert wrong.get_epsilon(1e-5) < 0.9 * secret


def test_a_release_whose_clients_are_known_costs_beside_secret_ones_as_if_all_were_drawn() -> None:
    """Releases of both kinds, with several noises: sampling makes only the secret ones cheaper."""
    secret = [Release(4.0, 10, 1000, True)] * 50 + [Release(3.0, 20, 1000, True)] * 10
    known = [Release(40.0, 10, 1000)] * 3
    mixed, all_drawn, all_secret = (
        PrivacyAccountant(1e-5, "replace-one", releases=secret + others).epsilon()
        for others in (known, [Release(40.0, 1000, 1000, True)] * 3, [one._replace(secret=True) for one in known])
    )
    oracle = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    for z, drawn, count in ((2.0, 10, 50), (1.5, 20, 10), (20.0, 1000, 3)):  # in units of the whole change, 2 C
        event = dp_accounting.SampledWithoutReplacementDpEvent(1000, drawn, dp_accounting.GaussianDpEvent(z))
        oracle.compose(event, count)
    assert mixed == all_drawn == pytest.approx(oracle.get_epsilon(1e-5), rel=1e-9)
    assert all_secret < 0.99 * mixed
    assert mixed == PrivacyAccountant(1e-5, "replace-one", releases=[*known, *secret]).epsilon()
    plain = [one._replace(secret=False) for one in [*secret, *known]]
    assert mixed < PrivacyAccountant(1e-5, "replace-one", releases=plain).epsilon()


def test_a_release_without_noise_has_no_epsilon() -> None:
    assert PrivacyAccountant(1e-5, "zero-out").epsilon() == 0
    assert PrivacyAccountant(1e-5, "zero-out", releases=[Release(1.0, 4, 4), Release(0.0, 4, 4)]).epsilon() == math.inf


def test_the_noise_for_an_epsilon_is_the_smallest() -> None:
    accountant = PrivacyAccountant(1e-5, "zero-out")
    z = accountant.noise_for(3.0, 10, 10, 20)
    assert accountant.epsilon([Release(z, 10, 10)] * 20) <= 3.0 < accountant.epsilon([Release(0.998 * z, 10, 10)] * 20)
    with pytest.raises(ConfigError, match="dp-target-epsilon=1e-06 over 1000 rounds"):
        accountant.noise_for(1e-6, 10, 10, 1000)


def test_releases_outlive_a_crash(tmp_path: Path) -> None:
    file = tmp_path / "privacy.jsonl"
    first = PrivacyAccountant(1e-5, "zero-out", file=file)
    for z in (1.0, 2.0):
        first.add(Release(z, 3, 4))
    with file.open("a") as lines:
        lines.write('{"noise_multip')  # killed in mid-write: the result of this release was never used
    second = PrivacyAccountant(1e-5, "zero-out", file=file)
    second.restore([Release(1.0, 3, 4)])  # of an older checkpoint
    assert second.releases == [Release(1.0, 3, 4), Release(2.0, 3, 4)]
    second.add(Release(3.0, 3, 4))
    third = PrivacyAccountant(1e-5, "zero-out", file=file)
    third.restore(())
    assert third.releases == second.releases
    file.write_text(file.read_text().splitlines(keepends=True)[0])  # a copy of an older file
    third.restore(second.releases)
    assert third.releases == second.releases
    assert len(file.read_text().splitlines()) == 3

"""The leakage meter: it finds what is there to be found, and nothing where there is nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from class_mix_attack import ClassMixAttack, Leakage, class_mix, shadow_clients

CLASSES = 4


def mixes(rng: np.random.Generator, number: int) -> np.ndarray:
    return rng.dirichlet(np.full(CLASSES, 0.5), number)


def updates(rng: np.random.Generator, of: np.ndarray, noise: float) -> list[dict[str, np.ndarray]]:
    """Updates that are linear in the mix, with noise."""
    to_mean, to_weight = np.random.default_rng(1).normal(size=(2, CLASSES, 6))
    return [
        {"mean": mix @ to_mean + noise * rng.normal(size=6), "weight": (mix @ to_weight).reshape(2, 3)} for mix in of
    ]


def test_updates_that_tell_the_mix_have_share_one_and_others_none() -> None:
    rng = np.random.default_rng(0)
    known, true = mixes(rng, 100), mixes(rng, 40)
    exact = ClassMixAttack(updates(rng, known, 0.0), known).measure(updates(rng, true, 0.0), true)
    assert exact.share > 0.99
    assert exact.error < 0.01 < exact.guess
    only_noise = [{"mean": rng.normal(size=6)} for _ in range(140)]
    nothing = ClassMixAttack(only_noise[:100], known).measure(only_noise[100:], true)
    assert abs(nothing.share) < 0.1


def test_an_estimate_is_a_mix() -> None:
    rng = np.random.default_rng(0)
    known = mixes(rng, 50)
    attack = ClassMixAttack(updates(rng, known, 0.0), known)
    for update in updates(rng, np.eye(CLASSES) * 3 - 1, 0.0):  # beyond the corners of the simplex
        found = attack.estimate(update)
        assert found.min() >= 0
        assert found.sum() == pytest.approx(1)


def test_entries_that_hardly_a_shadow_client_moves_do_not_decide() -> None:
    rng = np.random.default_rng(0)
    known, true = mixes(rng, 60), mixes(rng, 20)
    rare = 1e-6 * rng.normal(size=(60, 60)) * np.eye(60)  # each is moved by one shadow client
    still = [{**u, "rare": row} for u, row in zip(updates(rng, known, 0.0), rare, strict=True)]
    moved = [{**update, "rare": 1e-3 * rng.normal(size=60)} for update in updates(rng, true, 0.0)]
    assert ClassMixAttack(still, known).measure(moved, true).share > 0.9


def test_the_distance_of_two_mixes_is_the_total_variation() -> None:
    known = np.array([[1.0, 0.0], [0.0, 1.0]] * 10)
    attack = ClassMixAttack([{"x": mix[:1]} for mix in known], known)
    found = attack.measure([{"x": np.array([1.0])}, {"x": np.array([0.0])}], np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert found.error == pytest.approx(1, abs=0.02)
    assert found.guess == pytest.approx(0.5)
    assert found.share == pytest.approx(-1, abs=0.04)


def test_shadow_clients_have_many_mixes_of_the_public_classes() -> None:
    labels = np.repeat(np.arange(CLASSES), 30)
    found = shadow_clients(labels, CLASSES, number=60, examples=50, alpha=0.2, rng=np.random.default_rng(0))
    shares = np.stack([class_mix(labels[own], CLASSES) for own in found])
    assert shares.shape == (60, CLASSES)
    assert {len(own) for own in found} == {50}
    assert (shares.max(1) > 0.7).mean() > 0.5
    np.testing.assert_allclose(shares.mean(0), 0.25, atol=0.12)


def test_one_client_has_no_guess_to_compare_with() -> None:
    assert math.isnan(Leakage(0.1, 0.0).share)

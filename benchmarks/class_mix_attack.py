"""What one client's reply tells of its classes: an attack by regression, and its error as a number. NumPy only.

BatchNorm's statistics depend on the examples alone, so under label skew they tell which classes a client has. The
attacker has the model that was sent and some public data. It makes *shadow clients* with class mixes of its own choice
from the public data, trains them as a client trains, and learns the way from an update to a class mix by ridge
regression. Gradient inversion, which rebuilds examples, is another question; this meter does not answer it.

The distance of two class mixes is the total variation, half the sum of the differences: 0 = the same, 1 = no class in
common. ``Leakage.share`` sets the attack's error against that of the best guess that is the same for all clients, their
mean mix: 0 = the reply tells nothing of the single client, 1 = it tells the mix exactly. A share below 0 is an attack
worse than this guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbn_flwr.batchnorm.averaging import Array

__all__ = ["ClassMixAttack", "Leakage", "class_mix", "shadow_clients"]

_STRENGTHS = tuple(np.logspace(-3, 6, 19))  # of the ridge, chosen by leaving one shadow client out


@dataclass(frozen=True)
class Leakage:
    """How well an attack found the clients' class mixes.

    Attributes:
        error: mean distance of the estimates from the mixes.
        guess: the same of a guess that is the mean of these clients' mixes.
    """

    error: float
    guess: float

    @property
    def share(self) -> float:
        """1 - error / guess; NaN where the guess is exact: of one client, or of clients with one mix."""
        return 1 - self.error / self.guess if self.guess else math.nan


class ClassMixAttack:
    """Ridge regression from updates to class mixes.

    Args:
        updates: what the shadow clients send, entry name to array; all have the same entries.
        mixes: their class mixes (number of shadow clients, classes).
    """

    def __init__(self, updates: Sequence[Mapping[str, Array]], mixes: NDArray[np.float64]) -> None:
        from sklearn.linear_model import RidgeCV

        rows = np.stack([_row(update) for update in updates])
        spread = rows.std(0)
        # An entry that hardly a shadow client moves must not decide when a client moves it: the weight of a rare pixel.
        self._mean, self._std = rows.mean(0), spread + 0.01 * np.sqrt(np.mean(spread**2)) + 1e-12
        self._mixes = mixes
        self._model = RidgeCV(alphas=_STRENGTHS).fit((rows - self._mean) / self._std, mixes)

    def estimate(self, update: Mapping[str, Array]) -> NDArray[np.float64]:
        """Return the estimated class mix (classes,): at least 0, of sum 1."""
        row = (_row(update) - self._mean) / self._std
        found = np.clip(np.asarray(self._model.predict(row[None])[0], dtype=np.float64), 0, None)
        total = float(found.sum())
        return found / total if total > 0 else self._mixes.mean(0)

    def measure(self, updates: Sequence[Mapping[str, Array]], mixes: NDArray[np.float64]) -> Leakage:
        """Return the error over clients, given what they send and their true mixes (clients, classes)."""
        found = [_distance(self.estimate(update), mix) for update, mix in zip(updates, mixes, strict=True)]
        guess = [_distance(mixes.mean(0), mix) for mix in mixes]
        return Leakage(float(np.mean(found)), float(np.mean(guess)))


def class_mix(labels: Array, num_classes: int) -> NDArray[np.float64]:
    """Return the share of each class."""
    return np.bincount(labels, minlength=num_classes) / len(labels)


def shadow_clients(
    labels: Array, num_classes: int, *, number: int, examples: int, alpha: float, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Return the examples of each shadow client, drawn with replacement from public data.

    Args:
        labels: the class of each public example; every class must be there.
        num_classes: number of classes.
        number: number of shadow clients.
        examples: examples of each.
        alpha: concentration of the Dirichlet distribution that their class mixes have.
        rng: the generator.
    """
    places = [np.flatnonzero(labels == label) for label in range(num_classes)]
    found = []
    for mix in rng.dirichlet(np.full(num_classes, alpha), number):
        drawn = rng.choice(num_classes, examples, p=mix)
        found.append(np.array([rng.choice(places[label]) for label in drawn], dtype=np.int64))
    return found


def _row(update: Mapping[str, Array]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(update[name], dtype=np.float64).ravel() for name in sorted(update)])


def _distance(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(np.abs(one - other).sum() / 2)

r"""The coordinates for clipping a client's update and adding noise.

With the global state before the round, ``x``, running mean ``m`` and running variance
``v``, a client's state ``x_i``, ``m_i``, ``v_i`` has the update

$$x_i - x, \qquad s \, \frac{m_i - m}{\sqrt{v + e}}, \qquad s \, \frac{v_i - v}{v + e}$$

The statistics are in units of the layer, so that one noise fits all layers. ``s`` is
their share in the clipped norm, and ``e`` keeps the units of a dead channel finite. All
three are linear in the client's state, so an average of updates is the update of the
averaged state. Counters and other integers are not coordinates.

The inverse transformation keeps every variance above zero. With ``t`` the deviation of
the noise in a variance, a noisy variance ``r`` below ``t`` becomes
``t exp(r / t - 1)``. Other variances do not change. Relative noise can increase or
decrease a variance without limit over many rounds. Therefore a variance within [1e-12,
1e12] stays within these limits. Both rules use no data of clients, so they cost no
privacy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.parts import Parts, split_state
from fedbn_flwr.errors import ConfigError

Update = Mapping[str, Array]  # float64, by entry

CLIP = "fedbn-flwr.dp-clipping-norm"  # float: C

STATISTICS_SCALE = 0.1
"""s: a larger s means less noise in BN's running statistics, and more in other entries."""
E = 1e-5  # torch's default eps of a normalisation layer


class Coordinates:
    """The coordinates of a round.

    Args:
        before: the shared entries of the global state before the round.
        parts: the split. Running statistics of layers similar to BatchNorm, such as
            InstanceNorm, are found by their names.
        fixed: entries that no client changes. They have no coordinates and keep their
            value.

    Raises:
        ConfigError: an entry is complex.
    """

    def __init__(
        self, before: State, parts: Parts, fixed: Collection[str] = ()
    ) -> None:
        self._before = before
        self._units: dict[str, Array | float] = {}
        for name, array in before.items():
            if array.dtype.kind == "c":
                raise ConfigError(
                    f"entry '{name}' is complex, but dp needs real numbers"
                )
            if array.dtype.kind == "f" and name not in fixed:
                self._units[name] = 1.0
        # Find layers by type, and layers that are not BatchNorm by their names.
        self._variances = set()
        for mean, variance in {*split_state(before).moments(), *parts.moments()}:
            if mean in self._units and variance in self._units:
                square = _wide(before[variance]) + E
                self._units[mean] = np.sqrt(square) / STATISTICS_SCALE
                self._units[variance] = square / STATISTICS_SCALE
                self._variances.add(variance)

    def update(self, state: State) -> dict[str, Array]:
        """Return the update of a client's state, relative to the state before.

        Differences are computed in float64, because float32 would round them.
        """
        update = {}
        for name, unit in self._units.items():
            moved = _wide(state[name]) - _wide(self._before[name])
            update[name] = moved / unit
        return update

    def rounding(self) -> float:
        """Return the largest length of an update that only rounding can cause."""
        lengths = []
        for name, unit in self._units.items():
            before = self._before[name]
            size = np.linalg.norm(_wide(before) / unit)
            lengths.append(float(np.finfo(before.dtype).eps * size))
        return math.hypot(*lengths)

    def state(self, update: Update, deviation: float) -> dict[str, Array]:
        """Return the state before the round plus an update.

        Entries keep their dtypes, and integers do not change. Variances are kept above
        0 and within limits, as explained at the top of the module.

        Args:
            update: the update by entry.
            deviation: standard deviation of the noise in the update.
        """
        state = dict(self._before)
        for name, unit in self._units.items():
            like = self._before[name]
            moved: Array = _wide(like) + update[name] * unit
            if name in self._variances:
                moved = _bounded(_above_zero(moved, np.asarray(deviation * unit)), like)
            state[name] = moved.astype(like.dtype)
        return state


def norm(update: Update) -> float:
    """Return the Euclidean norm of all coordinates together."""
    return math.sqrt(sum(float(np.vdot(entry, entry)) for entry in update.values()))


def _above_zero(variance: Array, deviation: Array) -> Array:
    """Return t exp(r / t - 1) for variances r below t, the deviation of their noise."""
    if not (variance < deviation).any():
        return variance
    t = np.maximum(deviation, np.finfo(np.float64).tiny)
    return np.where(variance < t, t * np.exp(np.minimum(variance, t) / t - 1), variance)


def _bounded(variance: Array, before: Array) -> Array:
    """Return variances that stay within the limits if they were there before."""
    limits = np.finfo(before.dtype)
    low, high = max(1e-12, float(limits.tiny)), min(1e12, float(limits.max))
    within = (before >= low) & (before <= high)
    return np.where(within, np.clip(variance, low, high), variance)


def clipped(update: Update, clipping_norm: float) -> tuple[dict[str, Array], bool]:
    """Return the clipped update, and whether it was already short enough.

    The clipped update has at most the length ``clipping_norm``. An update of non-finite
    length is replaced by zero.
    """
    length = norm(update)
    if not math.isfinite(length):
        return {name: np.zeros_like(array) for name, array in update.items()}, False
    factor = clipping_norm / max(length, clipping_norm)
    scaled = {name: factor * array for name, array in update.items()}
    return scaled, length <= clipping_norm


def _wide(array: Array) -> Array:
    return array.astype(np.float64)

"""Clipping of updates in the coordinates of ``privacy.coordinates``, on the server or in a client."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.privacy.coordinates import Update, norm

__all__ = ["CLIP", "SCALE", "add_clipped", "clipped"]

CLIP = Key("fedbn-flwr.dp-clipping-norm", "float: C", "server", "client")
SCALE = Key("fedbn-flwr.dp-statistics-scale", "float: s", "server", "client")


def clipped(update: Update, clipping_norm: float) -> dict[str, Array]:
    """Return the update, scaled to ``clipping_norm`` if it is longer; zero if its length is not finite."""
    factor, _ = _factor(update, clipping_norm)
    return {name: factor * array if factor else np.zeros_like(array) for name, array in update.items()}


def add_clipped(total: dict[str, Array], updates: Iterable[Update], clipping_norm: float) -> int:
    """Add the clipped updates to ``total``, which is changed; return how many were not longer than C."""
    fitting = 0
    for update in updates:
        factor, fits = _factor(update, clipping_norm)
        fitting += fits
        for name, array in update.items() if factor else ():
            total[name] += factor * array
    return fitting


def _factor(update: Update, clipping_norm: float) -> tuple[float, bool]:
    """Return the factor that brings an update to ``clipping_norm`` if it is longer, and whether it was not longer.

    The factor of an update whose length is not finite is 0.
    """
    length = norm(update)
    if not math.isfinite(length):
        return 0.0, False
    return min(1.0, clipping_norm / length) if length else 1.0, length <= clipping_norm

"""Models to take away: BatchNorm folded, inputs normalised inside, in formats that need no part of this package."""

from __future__ import annotations

from fedbn_flwr.lab.export import *  # noqa: F403
from fedbn_flwr.lab.export import __all__ as __all__

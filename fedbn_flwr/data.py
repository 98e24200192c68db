"""Data of a run: data sets, kept once as bytes, their partitions over the clients, and the subsets that clients use."""

from __future__ import annotations

from fedbn_flwr.lab.data import *  # noqa: F403
from fedbn_flwr.lab.data import __all__ as __all__

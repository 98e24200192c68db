"""FedAvgM: momentum on the server, safe for BatchNorm.

Hsu, Qi, Brown 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
arXiv:1909.06335, section 3.3.

=========  ==================================================================
sent down  the whole state
sent up    the whole state
kept       nothing; the server keeps v, one number per entry it steps
cost       F floats down, F up per client, as FedAvg
=========  ==================================================================

beta -> ``server_momentum``; the server's rate (the paper: 1) -> ``server_learning_rate``. Delta w = the state before
minus the average; v = beta v + Delta w; w -= rate v. Differs from the paper, which has no BatchNorm: gamma, beta and
other floating entries are stepped, running statistics and counters are averaged as by FedAvg. Law: on a model without
BN the same numbers as Flower's own FedAvgM; without momentum and with rate 1 FedAvg; both to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.strategies.fedavg import FedAvgParams
from fedbn_flwr.strategies.fedopt import FedOpt

__all__ = ["FedAvgM", "FedAvgMParams"]


@dataclass(frozen=True, kw_only=True)
class FedAvgMParams(FedAvgParams):
    """Parameters of FedAvgM.

    Attributes:
        server_learning_rate: rate > 0 of the server's step.
        server_momentum: beta in [0, 1).
    """

    server_learning_rate: float = 1.0
    server_momentum: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if not (math.isfinite(self.server_learning_rate) and self.server_learning_rate > 0):
            raise ConfigError(f"server_learning_rate={self.server_learning_rate} must be a finite number above 0")
        if not 0 <= self.server_momentum < 1:
            raise ConfigError(f"server_momentum={self.server_momentum} must be in [0, 1)")


class FedAvgM(FedOpt):
    """FedAvg with momentum on the server."""

    name = "fedavgm"
    summary_line = "FedAvg with momentum on the server; BN statistics averaged"
    source = "Hsu 2019, arXiv:1909.06335"
    Params = FedAvgMParams
    checkpoint_keys = ("velocity",)

    velocity: dict[str, Array]

    def begin(self) -> None:
        """Start with v = 0."""
        super().begin()
        self.velocity = {}

    def step(self, server_round: int, name: str, delta: Array) -> Array:
        """Return rate v, v = beta v + Delta."""
        self.velocity[name] = self.params.server_momentum * self.velocity.get(name, 0.0) + delta
        return np.asarray(self.params.server_learning_rate * self.velocity[name])

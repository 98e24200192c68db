"""The learning rate over the rounds of a run. Torch is not needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedbn_flwr.errors import ConfigError


@dataclass(frozen=True)
class LearningRate:
    """The learning rate over server rounds, eta(r) for round r = 1, 2, ...

    eta(r) is the initial rate times the factor of every decay that has passed. A config
    gives the decays as fractions of the rounds (``lr-decay-at``); the lab converts them
    to rounds.

    Args:
        initial: the rate of round 1.
        decay_after: round r means "from round r + 1"; the word "freeze" means "after
            the method froze BN".
        factors: one factor for each entry of ``decay_after``.

    Raises:
        ConfigError: ``initial`` is not a finite number above 0, or the arguments do not
            fit each other.
    """

    initial: float
    decay_after: tuple[int | str, ...] = ()
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not (math.isfinite(self.initial) and self.initial > 0):
            raise ConfigError(
                f"the learning rate is {self.initial}; it must be finite and above 0"
            )
        if len(self.decay_after) != len(self.factors):
            raise ConfigError(
                f"the learning rate has {len(self.decay_after)} decays but"
                f" {len(self.factors)} factors"
            )

    def at(self, server_round: int, frozen: bool = False) -> float:
        """Return the learning rate of a round (counted from 1).

        ``frozen`` means that the method has frozen BN before this round.
        """
        rate = self.initial
        for after, factor in zip(self.decay_after, self.factors, strict=True):
            if isinstance(after, str):
                passed = frozen
            else:
                passed = server_round > after
            if passed:
                rate *= factor
        return rate

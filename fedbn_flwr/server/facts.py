"""What a method, and the checks of replies, know of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.travels import Travels

__all__ = ["Facts"]


@dataclass(frozen=True)
class Facts:
    """What a method knows of the run and of its round.

    Attributes:
        number: the round, counted from 1; 0 in ``begin``.
        num_rounds: R; None if Flower's own loop does not say it.
        parts: the split of the model's state.
        before: the global state that was sent; read-only.
        phase: the name of the round's phase.
        travels: what travels in the round, of all methods together.
        num_able: number of nodes with training data, N of the papers.
        known: labels of the clients of which the server knows that they keep something.
    """

    number: int
    num_rounds: int | None
    parts: Parts
    before: State
    phase: str = ""
    travels: Travels = field(default_factory=Travels)
    num_able: int = 0
    known: frozenset[str] = frozenset()

    @cached_property
    def held(self) -> tuple[str, ...]:
        """The entries that return as they were sent; those that stay with the clients are held there."""
        return self.parts.select(self.travels.held - self.travels.local)

    @cached_property
    def local(self) -> tuple[str, ...]:
        """The entries that stay with the clients."""
        return self.parts.select(self.travels.local)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the model's entries."""
        return {name: array.shape for name, array in self.before.items()}

    def total_rounds(self, setting: str) -> int:
        """Return the number of rounds, which a setting needs; ConfigError if Flower's loop does not say it."""
        if self.num_rounds is None:
            raise ConfigError(
                f"{setting} needs the number of rounds, which the strategy's own start() alone knows: give it as a "
                "round (int), not as a fraction; in Flower's legacy loop pass num_rounds= to to_legacy"
            )
        return self.num_rounds

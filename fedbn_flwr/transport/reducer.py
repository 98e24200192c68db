"""A client's place in a synchronised step."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fedbn_flwr.errors import FedBNError

__all__ = ["Dropped", "RetryStep", "Reducer"]


class RetryStep(FedBNError):
    """Another client was lost in mid-step: begin the step again, with those that are left."""


class Dropped(FedBNError):
    """This client is out of the round: it came too late, sent what cannot be used, or too few are left."""


class Reducer(Protocol):
    """What a carrier offers to one client of a round."""

    def begin(self) -> int:
        """Begin the step, or begin it again after ``RetryStep``; return the examples in the union of all clients' batches.

        Raises:
            Dropped: this client is out of the round.
        """

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        """Send ``tensor`` and return the answer of all clients to exchange ``tag``.

        Raises:
            RetryStep: the step must begin again.
            Dropped: this client is out of the round.
        """

    def close(self) -> None:
        """Say that the step is done: no more exchanges will be asked for."""

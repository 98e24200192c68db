"""A client's way into the exchanges of a synchronised step."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fedbn_flwr.errors import FedBNError

__all__ = ["Dropped", "Reducer", "RetryStep"]


class RetryStep(FedBNError):
    """Another client was lost during the step. Repeat the step; those who are left take part."""


class Dropped(FedBNError):
    """This client is out of the round: it came too late, sent what cannot be used, or too few clients are left."""


class Reducer(Protocol):
    """Sends a client's tensors and returns the answers of all clients, by whatever transport."""

    def begin(self) -> int:
        """Begin the step, or repeat it after ``RetryStep``; return the examples in the union of all clients' batches.

        Raises:
            Dropped: this client is out of the round.
        """

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        """Send ``tensor`` and return the answer of all clients to exchange ``tag``.

        Raises:
            RetryStep: the step must be repeated.
            Dropped: this client is out of the round.
        """

    def close(self) -> None:
        """Tell the server that the step is done: no more exchanges follow."""

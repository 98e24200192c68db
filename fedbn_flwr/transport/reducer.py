"""The interface through which a client takes part in the exchanges of a synchronised step."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fedbn_flwr.errors import FedBNError

__all__ = ["Dropped", "Reducer"]


class Dropped(FedBNError):
    """This client is out of the round: it was too late, sent an unusable tensor, or too few clients remain."""

    code = "dropped"


class Reducer(Protocol):
    """Sends a client's tensors and returns the reduced tensors of all clients, by any transport."""

    def begin(self) -> int:
        """Begin the step, or repeat it after ``RetryStep``; return the number of examples in all clients' batches.

        Raises:
            Dropped: this client is out of the round.
        """

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        """Send ``tensor`` and return the reduced tensor of all clients in exchange ``tag``.

        Raises:
            RetryStep: the step must be repeated.
            Dropped: this client is out of the round.
        """

    def close(self) -> None:
        """End the step: this client sends no more exchanges."""

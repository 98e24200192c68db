"""Sums that are known from before, and clients that would send the same into a second sum of the same model."""

from __future__ import annotations

import secrets

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.messages.records import state_sha256
from fedbn_flwr.server.nodes import Node

__all__ = ["RepeatedSums", "has_one_batch"]


class RepeatedSums:
    """What the server knows of earlier sums: whether a round begins with a model of which there may be one.

    Attributes:
        fresh: the number by which the clients of a resumed run draw new batches; 0 in another run.
    """

    def __init__(self) -> None:
        self.fresh = 0
        self._model = self._known = ""  # SHA-256 of the round's model, and of the last one of which sums are known
        self._resumed = False

    def resume(self) -> None:
        """Note that the run may have gone on before from the model of its next round."""
        self.fresh, self._resumed = secrets.randbits(62), True

    def begin_round(self, before: State) -> bool:
        """Begin a round with this model; return whether sums of it may be known."""
        self._model = state_sha256(before)
        if self._resumed:
            self._known, self._resumed = self._model, False
        return self._model == self._known

    def note_sum(self) -> None:
        """Note that a sum of the round's model is known."""
        self._known = self._model


def has_one_batch(node: Node) -> bool:
    """Return whether the node has no more examples than a batch, as far as it has said."""
    return node.batch_size is not None and node.batch_size >= (node.num_examples or 0)

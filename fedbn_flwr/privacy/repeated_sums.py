"""Sums that are known from before, and clients that would send the same into a second sum of the same weights."""

from __future__ import annotations

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.messages.records import state_sha256
from fedbn_flwr.server.nodes import Node

__all__ = ["RepeatedSums", "has_one_batch"]


class RepeatedSums:
    """What the server may know of earlier sums: whether there was one of the weights that are used now."""

    def __init__(self) -> None:
        self._weights = self._known = ""  # SHA-256 of the weights, and of the last of which a sum may be known
        self._resumed = False

    def resume(self) -> None:
        """Note that the run may have gone on before from the weights that come next."""
        self._resumed = True

    def begin(self, weights: State) -> bool:
        """Begin with these weights; return whether a sum of them may be known."""
        self._weights = state_sha256(weights)
        if self._resumed:
            self._known, self._resumed = self._weights, False
        return self._weights == self._known

    def note_sum(self) -> None:
        """Note that a sum of the weights may be known."""
        self._known = self._weights


def has_one_batch(node: Node) -> bool:
    """Return whether the node has no more examples than a batch, as far as it has said."""
    return node.batch_size is not None and node.batch_size >= (node.num_examples or 0)

"""The weighted sum of a round's masked vectors, and sums that are known from before.

Clients that would send the same into a second sum of the same weights are left out of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.errors import ReplyError
from fedbn_flwr.messages.protocol import MASK_EQUAL, MASK_PRESENT, MASK_RANGE, MASK_TOTAL, MASK_WEIGHT, MASKED
from fedbn_flwr.messages.records import state_sha256
from fedbn_flwr.privacy.masked_round import MaskedRound
from fedbn_flwr.privacy.masked_values import about
from fedbn_flwr.privacy.ring import FixedPoint
from fedbn_flwr.server.nodes import Node

__all__ = ["RepeatedSums", "RoundSum", "has_one_batch"]


class RoundSum:
    """The sum of a round's masked vectors, and its mean.

    Args:
        masks: the masks that the clients have agreed on.
        value_range: R, ``masked-range``.
        equal: whether all weights are 1; else a client's weight is its number of examples.

    Attributes:
        point: the fixed-point numbers of the sum.

    Raises:
        ConfigError: R is too large for the weights.
    """

    def __init__(self, masks: MaskedRound, value_range: float, equal: bool) -> None:
        self.masks, self._range, self._equal = masks, value_range, equal
        self._total = self.weight(masks.present)
        self.point = FixedPoint(value_range, self._total)
        masks.about = about(value_range, self._total, equal)

    def config(self, number: int) -> dict[str, Any]:
        """Return what a client is told of the sum."""
        entries: dict[str, Any] = {MASK_TOTAL: self._total, MASK_RANGE: self._range, MASK_EQUAL: self._equal}
        return entries | {MASK_PRESENT: self.masks.partners(number), MASK_WEIGHT: self.weight({number})}

    def weight(self, numbers: Collection[int]) -> float:
        """Return the sum of these clients' weights."""
        if self._equal:
            return float(len(numbers))
        return float(sum(self.masks.nodes[number].num_examples or 0 for number in numbers))

    def by_number(self, replies: Sequence[tuple[Node, State]]) -> dict[int, Array]:
        """Return the masked vectors by the number of the client."""
        number_of = {node.node_id: number for number, node in enumerate(self.masks.nodes)}
        return {number_of[node.node_id]: state[MASKED] for node, state in replies}

    def mean(self, vectors: Mapping[int, Array]) -> Array:
        """Return the weighted mean of what these clients have masked, without the masks that are left in the sum.

        Raises:
            MaskingError: the masks cannot be removed.
            ReplyError: the sum is out of range.
        """
        answered, total = frozenset(vectors), _sum(list(vectors.values()))
        return self.point.mean(total - self.masks.left_over(answered, total.size), self.weight(answered))

    def of_exchange(self, tag: str, tensors: Sequence[Tensor]) -> Array:
        """Return the sum of an exchange's tensors, int64, in which all masks cancel.

        Raises:
            ReplyError: a client's tensor is missing, or has no masks.
        """
        if len(tensors) < len(self.masks.present) or any(tensor.dtype != torch.int64 for tensor in tensors):
            raise ReplyError(f"exchange '{tag}' needs a masked tensor of int64 from each client")
        return _sum([tensor.numpy() for tensor in tensors])


def _sum(vectors: Sequence[Array]) -> Array:
    """Return the sum in the ring: int64, which wraps around."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total


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

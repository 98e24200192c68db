"""Batches of a client's data: the data interface of training and evaluation. Torch
only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Batches", "join_last", "with_positions"]


class Batches(Protocol):
    """The data interface of training and evaluation: a length, and batches by position.

    Any object with these two methods is such a data set; ``fedbn_flwr.lab.data.Subset``
    is one. ::

        class Memory:
            def __init__(self, inputs, targets):
                self.inputs, self.targets = inputs, targets

            def __len__(self):
                return len(self.inputs)

            def batch(self, positions, generator=None):
                return self.inputs[positions], self.targets[positions]
    """

    def __len__(self) -> int:
        """Return the number of examples."""

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Any, Tensor]:
        """Return (inputs, targets) at the positions (int64, any order), augmented if a
        generator is given.

        The model is called with the inputs as they are: a tensor, or tensors in a list,
        a tuple or a dict.
        """


def with_positions(
    data: Batches, order: Iterable[Tensor], generator: torch.Generator | None = None
) -> Iterator[tuple[Tensor, tuple[Any, Tensor]]]:
    """Yield the positions of each batch and the batch; data with a method ``batches``
    may read some batches ahead.
    """
    if not hasattr(data, "batches"):
        for positions in order:
            yield positions, data.batch(positions, generator)
        return
    # It asks for positions ahead of the batch that it gives: note them in between.
    asked: deque[Tensor] = deque()

    def noted() -> Iterator[Tensor]:
        for positions in order:
            asked.append(positions)
            yield positions

    for batch in data.batches(noted(), generator):
        yield asked.popleft(), batch


def join_last(batches: Sequence[Tensor]) -> list[Tensor]:
    """Return the batches with the last one joined to the one before it; none if there
    is one only.
    """
    *others, last = batches
    return [*others[:-1], torch.cat([others[-1], last])] if others else []

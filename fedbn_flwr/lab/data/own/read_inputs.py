"""Examples that are read from a user's data set each time they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedbn_flwr.lab.data.samples import LazyInputs

Read = Callable[[int], tuple[Tensor, Tensor]]
"""Returns the input (float32) and the target of an example."""


class ReadInputs(LazyInputs):
    """Inputs that a function reads one by one, with their targets.

    Args:
        read: reads the example with a number.
        count: number of examples.
        shape: shape of an input.
        by_pixel: whether targets are classes of pixels or voxels.
    """

    dtype = torch.float32

    def __init__(
        self, read: Read, count: int, shape: tuple[int, ...], by_pixel: bool
    ) -> None:
        self._read, self.shape, self.by_pixel = read, (count, *shape), by_pixel

    def read(
        self,
        numbers: Sequence[int],
        each: Sequence[str] = (),
        seeds: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs with these numbers, and their targets."""
        # The package's transforms are for images as bytes. A user's data set may have
        # its own transforms.
        del each, seeds
        # An empty batch has no targets whose type could be used. Read one example to
        # find the type.
        if not numbers:
            like = self._read(0)[1] if len(self) else torch.zeros((), dtype=torch.int64)
            return torch.zeros(0, *self.shape[1:], device=self.device), like.new_zeros(
                0, *like.shape, device=self.device
            )
        inputs, targets = zip(*map(self._read, numbers), strict=True)
        return torch.stack(inputs).to(self.device), torch.stack(targets).to(self.device)

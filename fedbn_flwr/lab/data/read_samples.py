"""Labelled examples that are read from a user's data set each time they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from fedbn_flwr.lab.data.augment import Augment, Draw

__all__ = ["ReadSamples"]

Read = Callable[[int], tuple[Tensor, Tensor]]
"""Returns the input (float32) and the target of an example."""


class ReadSamples:
    """Labelled examples that a function reads one by one; see ``data.samples.Examples``.

    Args:
        read: reads the example with a number.
        count: number of examples.
        shape: shape of an input.
        labels: class of each example, int64 (N,); None if an example has not one class.
        groups: group of each example, int64 (N,), or None.
        units: unit of each example, int64 (N,), or None.
        device: of what ``take`` returns.
    """

    as_bytes = False

    def __init__(
        self,
        read: Read,
        count: int,
        shape: tuple[int, ...],
        labels: Tensor | None,
        groups: Tensor | None = None,
        units: Tensor | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self._read, self._count, self.shape = read, count, shape
        self.device = torch.device(device)
        self._labels, self.groups, self.units = (
            None if part is None else part.to(self.device) for part in (labels, groups, units)
        )

    def __len__(self) -> int:
        """Return the number of examples."""
        return self._count

    @property
    def by_pixel(self) -> bool:
        """Whether targets are the classes of pixels or voxels."""
        return self.targets_of([0])[0].dtype == torch.uint8 if self._count else False

    @property
    def by_class(self) -> bool:
        """Whether every example has one class."""
        return self._labels is not None

    @property
    def targets(self) -> Tensor:
        """Target of each example; without classes all examples are read."""
        if self._labels is not None:
            return self._labels
        return torch.stack(self.targets_of(range(self._count))).to(self.device)

    def targets_of(self, numbers: Iterable[int]) -> list[Tensor]:
        """Return the targets of some examples, which are read."""
        return [self._read(number)[1] for number in numbers]

    @property
    def labels(self) -> Tensor:
        """The class of each example for splits over clients, int64 (N,); all 0 if an example has not one class."""
        return torch.zeros(self._count, dtype=torch.int64, device=self.device) if self._labels is None else self._labels

    def regrouped(self, groups: Tensor | None, units: Tensor | None = None) -> ReadSamples:
        """Return the same examples with other groups and units."""
        return ReadSamples(self._read, self._count, self.shape, self._labels, groups, units, self.device)

    def to(self, device: str | torch.device) -> ReadSamples:
        """Return the same samples, whose batches come on ``device``."""
        return ReadSamples(self._read, self._count, self.shape, self._labels, self.groups, self.units, device)

    def take(self, chosen: Tensor, augment: Augment | None = None, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return the examples at these numbers (int64 (B,)) and their targets; nothing augments them."""
        del augment, draw  # it is for images as bytes
        if not len(chosen):
            like = self._read(0)[1] if self._count else torch.zeros((), dtype=torch.int64)
            return torch.zeros(0, *self.shape, device=self.device), like.new_zeros(0, *like.shape, device=self.device)
        inputs, targets = zip(*(self._read(number) for number in chosen.tolist()), strict=True)
        return torch.stack(inputs).to(self.device), torch.stack(targets).to(self.device)

    def take_each(
        self, requests: Iterable[tuple[Tensor, Draw | None]], augment: Augment | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``take`` of each request, in order."""
        for chosen, _ in requests:
            yield self.take(chosen)

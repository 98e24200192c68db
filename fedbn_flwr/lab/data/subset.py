"""Subsets of shared examples, with normalised batches and no copy of the examples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbn_flwr.lab.data.augment import Augment
from fedbn_flwr.lab.data.samples import Samples

# largest number of bytes of floats in one conversion, so that the floats stay in the
# CPU's cache
_BLOCK = 2**21
# alignment of torch's memory in bytes
_ALIGNED = 64


class Subset:
    """The examples of one client or one test, at positions 0..len-1.

    Several subsets share one ``Samples``.
    """

    __slots__ = ("_augment", "_indices", "_mean", "_samples", "_std")

    def __init__(
        self,
        samples: Samples,
        indices: Tensor | npt.NDArray[np.integer[Any]] | None,
        *,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        augment: Augment | None = None,
    ) -> None:
        """Create the subset without a copy of an example.

        Args:
            samples: the shared samples.
            indices: integers (n,), the example at each position; None for all examples
                in order.
            mean: subtracted per channel from pixels scaled to [0, 1], or per feature
                (channel) of other inputs; with (), other inputs are used unchanged.
            std: divisor per channel or feature, above 0; or ().
            augment: ``batch`` applies it if it gets a generator.
        """
        self._samples, self._augment = samples, augment
        self._indices: Tensor | None = None
        if indices is not None:
            self._indices = torch.as_tensor(indices, device=samples.device)
        # Give mean and std the shape (C, 1, 1) for images, so that they broadcast over
        # a batch.
        shape = (-1, *[1] * len(samples.shape[1:]))
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=samples.device).view(shape)
            for values in (mean, std)
        )

    def __len__(self) -> int:
        """Return the number of examples in the subset."""
        return len(self._samples) if self._indices is None else self._indices.shape[0]

    @property
    def samples(self) -> Samples:
        """The shared samples."""
        return self._samples

    @property
    def targets(self) -> Tensor:
        """Targets of the examples, see ``Samples``, on the samples' device."""
        return self._of_positions(self._samples.targets)

    @property
    def indices(self) -> Tensor:
        """The example at each position, int64 (n,)."""
        if self._indices is None:
            return torch.arange(len(self._samples))
        return self._indices

    @property
    def groups(self) -> Tensor | None:
        """Groups of the examples, int64 (n,), on the samples' device, or None."""
        groups = self._samples.groups
        return None if groups is None else self._of_positions(groups)

    @property
    def units(self) -> Tensor | None:
        """The unit of each example, int64 (n,), or None if each is its own unit."""
        units = self._samples.units
        return None if units is None else self._of_positions(units)

    def _of_positions(self, values: Tensor) -> Tensor:
        return values if self._indices is None else values[self._indices]

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the examples at ``positions``, normalised, and their targets.

        Images are (x / 255 - mean) / std. Only the batch becomes floating point; images
        stay bytes.

        Args:
            positions: int64 (B,), each in 0..len-1, repeats allowed, on any device.
            generator: a CPU generator for the augmentation; None disables augmentation
                (evaluation).

        Returns:
            On the samples' device: float32 (B, C, H, W), or (B, ...) in the shape of
            the inputs; and int64 (B,), int64 (B, H, W) for the classes of pixels, or
            float32 (B,) or (B, K).

        Raises:
            IndexError: a position is outside the subset (on the CPU; on other devices
                torch reports it differently).
        """
        chosen = positions.to(self._samples.device)
        if self._indices is not None:
            chosen = self._indices.index_select(0, chosen)
        draw = None
        if generator is not None and self._augment is not None:
            draw = self._augment.draw(len(positions), generator)
        return self._prepared(*self._samples.take(chosen, self._augment, draw))

    def batches(
        self, positions: Iterable[Tensor], generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``batch`` of each of the ``positions``, in order.

        Images in memory become floating point several batches at a time, as long as
        these take at most ``_BLOCK`` bytes. This needs fewer calls, and the bits are
        equal.
        """
        # Convert batch by batch if the examples are augmented, because each batch has
        # its own random draws, or if the examples are in files, because files are read
        # for one batch at a time.
        augmented = generator is not None and self._augment is not None
        if augmented or not self._samples.in_memory:
            for batch in positions:
                yield self.batch(batch, generator)
            return
        for block in _blocks(positions, 4 * math.prod(self._samples.shape)):
            together = torch.cat(block) if len(block) > 1 else block[0]
            sizes = [len(batch) for batch in block]
            parts = (torch.split(values, sizes) for values in self.batch(together))
            yield from zip(*parts, strict=True)

    def _prepared(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self._samples.as_given:
            return inputs, targets
        # Only the first operation makes a new tensor. The others act in place on this
        # tensor.
        if inputs.dtype == torch.uint8:
            inputs = inputs.to(torch.float32).div_(255).sub_(self._mean).div_(self._std)
        elif len(self._mean):
            inputs = inputs.sub(self._mean).div_(self._std)
        # uint8 targets are classes of pixels, and the losses need int64.
        if targets.dtype == torch.uint8:
            targets = targets.to(torch.int64)
        return inputs, targets


def _blocks(positions: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Yield lists of batches. A list with several has at most ``_BLOCK`` bytes.

    Args:
        positions: the positions of the examples of each batch.
        size: bytes of one example.
    """
    # Combine batches only if each example's size is a multiple of the alignment: matrix
    # products of the same numbers may differ in their last bits if the memory is
    # aligned differently.
    block: list[Tensor] = []
    room = _BLOCK
    for batch in positions:
        room -= size * len(batch)
        if block and (room < 0 or size % _ALIGNED):
            yield block
            block, room = [], _BLOCK - size * len(batch)
        block.append(batch)
    if block:
        yield block

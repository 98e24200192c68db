"""Labelled examples, kept once: images as bytes; features of tables, signals and the like as float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.augment import Augment, Draw

__all__ = ["Examples", "Samples"]


class Examples(Protocol):
    """Labelled examples on one device: ``Samples`` in memory, or ``data.image_files.FileSamples`` on the disk.

    Attributes:
        targets: class of each image, int64 (N,); class of each pixel, uint8 (N, H, W), 255 = ignored; or float32 (N,)
            or (N, K), the target of a regression or labels 0 and 1.
        groups: group of each example (a domain, a city, a hospital), int64 (N,); None if there are no groups.
        units: examples with the same number (those of a patient) stay together in a split, int64 (N,); None if every
            example is its own unit.
    """

    @property
    def targets(self) -> Tensor: ...  # noqa: D102
    @property
    def groups(self) -> Tensor | None: ...  # noqa: D102
    @property
    def units(self) -> Tensor | None: ...  # noqa: D102

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example, (C, H, W) for images."""

    @property
    def as_bytes(self) -> bool:
        """Whether examples are images as bytes, 0..255."""

    @property
    def device(self) -> torch.device:
        """The device of what ``take`` returns."""

    @property
    def by_pixel(self) -> bool:
        """Whether targets are the classes of pixels (segmentation)."""

    @property
    def by_class(self) -> bool:
        """Whether every example has one class."""

    @property
    def labels(self) -> Tensor:
        """The class of each example for splits over clients, int64 (N,); all 0 if an example has not one class."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def take(self, chosen: Tensor, augment: Augment | None = None, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return the examples at these numbers (int64 (B,)) and their targets, augmented by what was drawn."""

    def take_each(
        self, requests: Iterable[tuple[Tensor, Draw | None]], augment: Augment | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``take`` of each request, in order; examples on the disk are read ahead."""

    def to(self, device: str | torch.device) -> Examples:
        """Return the same examples on ``device``."""

    def regrouped(self, groups: Tensor | None, units: Tensor | None = None) -> Examples:
        """Return the same examples with other groups and units."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Labelled examples in memory, on one device; see ``Examples``.

    Attributes:
        inputs: pixels 0..255, uint8, (N, C, H, W), which may be an expanded (stride 0) tensor over C; or float32
            (N, ...), features or signals.
        targets: see ``Examples``.
        groups: see ``Examples``.
        units: see ``Examples``.
    """

    inputs: Tensor
    targets: Tensor
    groups: Tensor | None = None
    units: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise DataError unless dtypes, shapes and devices are as above."""
        images = self.inputs.dtype == torch.uint8 and self.inputs.ndim == 4
        if not images and not (self.inputs.dtype == torch.float32 and self.inputs.ndim >= 2):
            raise DataError(
                f"sample inputs are {self.inputs.dtype} of shape {tuple(self.inputs.shape)}; uint8 (N, C, H, W) needed "
                "for images, float32 (N, ...) for features and signals."
            )
        _check_targets(self.targets, len(self.inputs), tuple(self.inputs.shape[2:]) if images else ())
        count = len(self.inputs)
        for what, tensor in (("groups", self.groups), ("units", self.units)):
            if tensor is not None and (tensor.dtype, tensor.shape) != (torch.int64, (count,)):
                raise DataError(
                    f"sample {what} are {tensor.dtype} of shape {tuple(tensor.shape)}; int64 ({count},) needed."
                )
        for what, tensor in (("targets", self.targets), ("groups", self.groups), ("units", self.units)):
            if tensor is not None and tensor.device != self.inputs.device:
                raise DataError(f"sample inputs are on {self.inputs.device}, {what} on {tensor.device}.")

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.targets)

    def to(self, device: str | torch.device) -> Samples:
        """Return the same samples on ``device``; tensors that are there already are not copied."""
        groups, units = (None if part is None else part.to(device) for part in (self.groups, self.units))
        grey = self.inputs.ndim == 4 and self.inputs.stride(1) == 0  # channels that share their memory
        inputs = self.inputs[:, :1].to(device).expand_as(self.inputs) if grey else self.inputs.to(device)
        return Samples(inputs, self.targets.to(device), groups, units)

    def regrouped(self, groups: Tensor | None, units: Tensor | None = None) -> Samples:
        """Return the same examples with other groups and units."""
        return Samples(self.inputs, self.targets, groups, units)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example, (C, H, W) for images."""
        return tuple(self.inputs.shape[1:])

    @property
    def as_bytes(self) -> bool:
        """Whether examples are images as bytes."""
        return self.inputs.dtype == torch.uint8

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return self.inputs.device

    @property
    def by_pixel(self) -> bool:
        """Whether targets are the classes of pixels (segmentation)."""
        return self.targets.ndim == 3

    @property
    def by_class(self) -> bool:
        """Whether every example has one class."""
        return self.targets.dtype == torch.int64

    @property
    def labels(self) -> Tensor:
        """The class of each example for splits over clients, int64 (N,); all 0 if an example has not one class."""
        return self.targets if self.by_class else self.targets.new_zeros(len(self), dtype=torch.int64)

    def take(self, chosen: Tensor, augment: Augment | None = None, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return the examples at these numbers and their targets; see ``Examples``."""
        # index_select, because indexing with [] takes several times as long for a batch.
        inputs, targets = self.inputs.index_select(0, chosen), self.targets.index_select(0, chosen)
        if augment is not None and draw is not None:
            inputs, targets = augment.apply(*augment.apply_each(inputs, targets, draw), draw)
        return inputs, targets

    def take_each(
        self, requests: Iterable[tuple[Tensor, Draw | None]], augment: Augment | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``take`` of each request."""
        for chosen, draw in requests:
            yield self.take(chosen, augment, draw)


def _check_targets(targets: Tensor, count: int, pixels: tuple[int, ...]) -> None:
    """Raise DataError unless the targets fit ``count`` examples, images of these (height, width) or () for others."""
    shape = tuple(targets.shape)
    allowed = targets.dtype == torch.int64 and shape == (count,)
    allowed |= targets.dtype == torch.uint8 and len(pixels) == 2 and shape == (count, *pixels)
    allowed |= targets.dtype == torch.float32 and targets.ndim in (1, 2) and shape[0] == count
    if not allowed:
        raise DataError(
            f"sample targets are {targets.dtype} of shape {shape}; int64 ({count},) needed"
            + (f", or uint8 {(count, *pixels)} for pixels" if pixels else "")
            + f", or float32 ({count},) or ({count}, K)."
        )

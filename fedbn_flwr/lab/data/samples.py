"""Labelled examples, kept once: images as bytes; features of tables, signals and the like as float32."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.augment import Augment, Draw
from fedbn_flwr.training.input_scale import FeatureMoments, FeatureRanges

if TYPE_CHECKING:
    from fedbn_flwr.lab.data.image_files.file_samples import FileSamples
    from fedbn_flwr.lab.data.read_samples import ReadSamples

__all__ = ["Examples", "Samples", "moments_of_inputs"]

logger = logging.getLogger("flwr")

_CHUNK = 4096  # examples whose inputs are float64 at the same time


Examples: TypeAlias = "Samples | FileSamples | ReadSamples"
"""Labelled examples on one device: in memory, images that stay on the disk, or what a user's data set reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Labelled examples in memory, on one device.

    Attributes:
        inputs: pixels 0..255, uint8, (N, C, H, W), which may be an expanded (stride 0) tensor over C; or float32
            (N, ...), features or signals.
        targets: class of each image, int64 (N,); class of each pixel or voxel, uint8 (N, H, W) or (N, D, H, W), 255 =
            ignored; or float32 (N,) or (N, K), the target of a regression or labels 0 and 1.
        groups: group of each example (a domain, a city, a hospital), int64 (N,); None if there are no groups.
        units: examples with the same number (those of a patient) stay together in a split, int64 (N,); None if every
            example is its own unit.
    """

    inputs: Tensor
    targets: Tensor
    groups: Tensor | None = None
    units: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise DataError unless dtypes, shapes and devices are as above."""
        inputs, count = self.inputs, len(self.inputs)
        images = inputs.dtype == torch.uint8 and inputs.ndim == 4
        if not images and not (inputs.dtype == torch.float32 and inputs.ndim >= 2):
            raise DataError(
                f"sample inputs are {inputs.dtype} of shape {tuple(inputs.shape)}; uint8 (N, C, H, W) needed "
                "for images, float32 (N, ...) for features and signals."
            )
        _check_targets(self.targets, count, tuple(inputs.shape[2:]))
        for what, tensor in {"targets": self.targets, "groups": self.groups, "units": self.units}.items():
            if tensor is None:
                continue
            if what != "targets" and (tensor.dtype, tensor.shape) != (torch.int64, (count,)):
                raise DataError(
                    f"sample {what} are {tensor.dtype} of shape {tuple(tensor.shape)}; int64 ({count},) needed."
                )
            if tensor.device != inputs.device:
                raise DataError(f"sample inputs are on {inputs.device}, {what} on {tensor.device}.")

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
        return self.targets.dtype == torch.uint8

    @property
    def by_class(self) -> bool:
        """Whether every example has one class."""
        return self.targets.dtype == torch.int64

    @property
    def labels(self) -> Tensor:
        """The class of each example for splits over clients, int64 (N,); all 0 if an example has not one class."""
        return self.targets if self.by_class else self.targets.new_zeros(len(self), dtype=torch.int64)

    def take(self, chosen: Tensor, augment: Augment | None = None, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return the examples at these numbers (int64 (B,)) and their targets, augmented by what was drawn."""
        # index_select, because indexing with [] takes several times as long for a batch.
        inputs, targets = self.inputs.index_select(0, chosen), self.targets.index_select(0, chosen)
        if augment is not None and draw is not None:
            inputs, targets = augment.apply(*augment.apply_each(inputs, targets, draw), draw)
        return inputs, targets

    def take_each(
        self, requests: Iterable[tuple[Tensor, Draw | None]], augment: Augment | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``take`` of each request, in order."""
        for chosen, draw in requests:
            yield self.take(chosen, augment, draw)


def moments_of_inputs(
    samples: Examples, indices: npt.NDArray[np.int64] | Tensor, ranges: FeatureRanges | None = None
) -> FeatureMoments:
    """Return the sums of some examples' inputs, from which their mean and std follow; a NaN is missing.

    With ranges each value is first put into its range; the log has how many examples had one outside.

    Raises:
        DataError: the examples are images on the disk.
    """
    if not isinstance(samples, Samples):
        raise DataError(
            "standardise=federated and local read all training examples before round 1; these stay on the disk. Leave "
            "standardise empty, or give a larger cache-gib."
        )
    zeros = torch.zeros(samples.shape[0], dtype=torch.float64)
    total, outside = FeatureMoments(zeros, zeros, zeros), 0
    for part in torch.split(torch.as_tensor(indices), _CHUNK):
        values = samples.inputs[part.to(samples.device)].cpu().double().transpose(0, 1).flatten(1)
        values = values / 255 if samples.as_bytes else values
        if ranges:
            inside = ranges.clipped(values)
            outside += int(
                ((inside != values) & ~values.isnan()).reshape(len(inside), len(part), -1).any(2).any(0).sum()
            )
            values = inside
        count = (~values.isnan()).sum(1).double()
        mean = values.nan_to_num(0).sum(1) / count.clamp(min=1)
        deviations = (values - mean[:, None]).nan_to_num(0)
        total = total.merged(FeatureMoments(count, mean, deviations.square().sum(1)))
    if outside:
        logger.warning(
            "%d of %d training examples have a value outside feature-ranges: the sums have the end of the range for it",
            outside,
            len(indices),
        )
    return total


def _check_targets(targets: Tensor, count: int, pixels: tuple[int, ...]) -> None:
    """Raise DataError unless the targets fit ``count`` examples with these sizes behind the channels."""
    kind, shape = targets.dtype, tuple(targets.shape)
    one_class = kind == torch.int64 and shape == (count,)
    of_pixels = kind == torch.uint8 and len(pixels) > 1 and shape == (count, *pixels)
    numbers = kind == torch.float32 and targets.ndim in (1, 2) and shape[0] == count
    if not (one_class or of_pixels or numbers):
        for_pixels = f", or uint8 {(count, *pixels)} for pixels" if len(pixels) > 1 else ""
        raise DataError(
            f"sample targets are {kind} of shape {shape}; int64 ({count},) needed{for_pixels}, or float32 ({count},) "
            f"or ({count}, K)."
        )

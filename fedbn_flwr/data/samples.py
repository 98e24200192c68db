"""Images, kept once as bytes, and subsets of them, which hold indices but no copy of the images (torch only)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbn_flwr.data.augment import Augment
from fedbn_flwr.errors import DataError

__all__ = ["Dataset", "Samples", "Subset"]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Labelled images on one device.

    Attributes:
        inputs: pixels 0..255, uint8, (N, C, H, W). May be an expanded (stride 0) tensor over C.
        targets: class of each image, int64, (N,); or of each pixel (segmentation), uint8, (N, H, W), 255 = ignored.
        groups: group of each image (a domain, a city, a writer), int64, (N,); None if there are no groups.
    """

    inputs: Tensor
    targets: Tensor
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise DataError unless dtypes, shapes and devices are as above."""
        if self.inputs.dtype != torch.uint8 or self.inputs.ndim != 4:
            raise DataError(
                f"sample inputs are {self.inputs.dtype} of shape {tuple(self.inputs.shape)}; uint8 (N, C, H, W) needed."
            )
        count, _, height, width = self.inputs.shape
        allowed = ((torch.int64, (count,)), (torch.uint8, (count, height, width)))
        if (self.targets.dtype, tuple(self.targets.shape)) not in allowed:
            raise DataError(
                f"sample targets are {self.targets.dtype} of shape {tuple(self.targets.shape)}; "
                f"int64 ({count},) needed, or uint8 ({count}, {height}, {width}) for pixels."
            )
        if self.groups is not None and (self.groups.dtype, self.groups.shape) != (torch.int64, (count,)):
            raise DataError(
                f"sample groups are {self.groups.dtype} of shape {tuple(self.groups.shape)}; int64 ({count},) needed."
            )
        for what, tensor in (("targets", self.targets), ("groups", self.groups)):
            if tensor is not None and tensor.device != self.inputs.device:
                raise DataError(f"sample inputs are on {self.inputs.device}, {what} on {tensor.device}.")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.targets)

    def to(self, device: str | torch.device) -> Samples:
        """Return the same samples on ``device``; tensors that are there already are not copied."""
        groups = None if self.groups is None else self.groups.to(device)
        return Samples(self.inputs.to(device), self.targets.to(device), groups)

    @property
    def by_pixel(self) -> bool:
        """Whether targets are the classes of pixels (segmentation)."""
        return self.targets.ndim == 3

    @property
    def labels(self) -> Tensor:
        """The class of each image for splits over clients, int64 (N,); all 0 if targets are classes of pixels."""
        return self.targets.new_zeros(len(self), dtype=torch.int64) if self.by_pixel else self.targets


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A training and a test set of one kind of images.

    Attributes:
        name: name in the registry of data sets.
        train: training samples.
        test: test samples.
        num_classes: targets are 0..num_classes - 1.
        mean: mean of the training pixels per channel, pixels scaled to [0, 1].
        std: standard deviation, in the same way.
        group_names: names of the groups 0, 1, ... of training and test samples; () if there are no groups.
    """

    name: str
    train: Samples
    test: Samples
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    group_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise DataError unless both sets have groups with names, or neither has groups."""
        for what, samples in (("training", self.train), ("test", self.test)):
            if (samples.groups is None) != (not self.group_names):
                raise DataError(
                    f"data set {self.name!r}: {len(self.group_names)} names of groups, but the {what} samples have "
                    f"{'no' if samples.groups is None else 'some'} groups. Give both or neither."
                )
            if samples.groups is not None and len(samples):
                low, high = (int(bound) for bound in torch.aminmax(samples.groups))
                if low < 0 or high >= len(self.group_names):
                    raise DataError(
                        f"data set {self.name!r}: groups of the {what} samples run from {low} to {high}; "
                        f"the {len(self.group_names)} names allow 0 to {len(self.group_names) - 1}."
                    )


class Subset:
    """The images of one client or one evaluation: each position 0..len-1 stands for an image of shared samples."""

    __slots__ = ("_augment", "_indices", "_mean", "_samples", "_std")

    def __init__(
        self,
        samples: Samples,
        indices: Tensor | npt.NDArray[np.integer[Any]] | None,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment | None = None,
    ) -> None:
        """Create the subset; no image is copied.

        Args:
            samples: the shared samples.
            indices: integers (n,), the image at each position; None = all images in order.
            mean: subtracted per channel from pixels scaled to [0, 1].
            std: divisor per channel, above 0.
            augment: ``batch`` applies it if it gets a generator.

        Raises:
            DataError: indices are not a vector of integers within the samples, or mean and std do not fit.
        """
        channels = samples.inputs.shape[1]
        if len(mean) != channels or len(std) != channels or not all(value > 0 for value in std):
            raise DataError(
                f"mean {tuple(mean)} and std {tuple(std)} do not fit images of {channels} channels: "
                "one number per channel needed, std above 0."
            )
        device = samples.inputs.device
        self._samples = samples
        self._indices = None if indices is None else _checked(torch.as_tensor(indices), len(samples)).to(device)
        self._mean = torch.tensor(mean, dtype=torch.float32, device=device).view(-1, 1, 1)
        self._std = torch.tensor(std, dtype=torch.float32, device=device).view(-1, 1, 1)
        self._augment = augment

    def __len__(self) -> int:
        """Return the number of images in the subset."""
        return len(self._samples) if self._indices is None else len(self._indices)

    @property
    def samples(self) -> Samples:
        """The shared samples."""
        return self._samples

    @property
    def targets(self) -> Tensor:
        """Classes of the images, int64 (n,), or of their pixels, uint8 (n, H, W), on the samples' device."""
        return self._samples.targets if self._indices is None else self._samples.targets[self._indices]

    @property
    def groups(self) -> Tensor | None:
        """Groups of the images, int64 (n,), on the samples' device; None if the samples have no groups."""
        groups = self._samples.groups
        return groups if groups is None or self._indices is None else groups[self._indices]

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the images at ``positions`` as (x / 255 - mean) / std, and their classes, on the samples' device.

        Only the batch becomes floating point; the samples stay bytes.

        Args:
            positions: int64 (B,), each in 0..len-1, repeats allowed, on any device.
            generator: a CPU generator for the augmentation; None = no augmentation (evaluation).

        Returns:
            float32 (B, C, H, W) and int64 (B,), or int64 (B, H, W) for the classes of pixels.

        Raises:
            IndexError: a position is outside the subset (on the CPU; on other devices torch reports it differently).
        """
        positions = positions.to(self._samples.inputs.device)
        # index_select, because indexing with [] takes several times as long for a batch.
        chosen = positions if self._indices is None else self._indices.index_select(0, positions)
        images, targets = self._samples.inputs.index_select(0, chosen), self._samples.targets.index_select(0, chosen)
        if generator is not None and self._augment is not None:
            if targets.ndim == 3:
                images, targets = self._augment.with_pixels(images, targets, generator)
            else:
                images = self._augment(images, generator)
        inputs = images.to(torch.float32).div_(255).sub_(self._mean).div_(self._std)
        return inputs, targets.to(torch.int64)


def _checked(indices: Tensor, count: int) -> Tensor:
    """Return ``indices`` as int64 after checking that they are integers (n,) in 0..count-1."""
    if indices.ndim != 1 or indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise DataError(
            f"indices of a subset are {indices.dtype} of shape {tuple(indices.shape)}; a vector of integers needed."
        )
    indices = indices.to(torch.int64)
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= count):
        raise DataError(
            f"indices of a subset run from {int(indices.min())} to {int(indices.max())}; "
            f"the samples have 0 to {count - 1}."
        )
    return indices

"""Images held once as bytes, and views of them: an index each, never a copy of the images (torch only)."""

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

__all__ = ["Dataset", "Samples", "View"]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Labelled images on one device.

    Attributes:
        inputs: pixels 0..255, uint8, (N, C, H, W). May be an expanded (stride 0) tensor over C.
        targets: class of each image, int64, (N,).
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        """Raise DataError unless dtypes, shapes and devices are as documented."""
        if self.inputs.dtype != torch.uint8 or self.inputs.ndim != 4:
            raise DataError(
                f"sample inputs are {self.inputs.dtype} of shape {tuple(self.inputs.shape)}; uint8 (N, C, H, W) needed."
            )
        if self.targets.dtype != torch.int64 or self.targets.shape != self.inputs.shape[:1]:
            raise DataError(
                f"sample targets are {self.targets.dtype} of shape {tuple(self.targets.shape)}; "
                f"int64 ({len(self.inputs)},) needed."
            )
        if self.inputs.device != self.targets.device:
            raise DataError(f"sample inputs are on {self.inputs.device}, targets on {self.targets.device}.")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.targets)

    def to(self, device: str | torch.device) -> Samples:
        """Return the same samples on ``device``, without a copy where they are there already."""
        return Samples(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A training and a test set of one kind of images.

    Attributes:
        name: name in the registry of data sets.
        train: training samples.
        test: test samples.
        num_classes: targets are 0..num_classes - 1.
        mean: mean of the training pixels per channel, pixels scaled to [0, 1].
        std: standard deviation, likewise.
    """

    name: str
    train: Samples
    test: Samples
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


class View:
    """What one client, or one evaluation, sees of shared samples: positions 0..len-1 stand for chosen images."""

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
        """Describe the view; no image is copied.

        Args:
            samples: the shared samples.
            indices: integers (n,), the image behind each position; None for all images in order.
            mean: subtracted per channel, in pixels scaled to [0, 1].
            std: divisor per channel, above 0.
            augment: applied in ``batch`` where a generator is given.

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
        """Return the number of images in the view."""
        return len(self._samples) if self._indices is None else len(self._indices)

    @property
    def samples(self) -> Samples:
        """The shared samples."""
        return self._samples

    @property
    def targets(self) -> Tensor:
        """Classes of the view's images, int64 (n,), on the samples' device."""
        return self._samples.targets if self._indices is None else self._samples.targets[self._indices]

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the images at ``positions`` as (x / 255 - mean) / std, and their classes, on the samples' device.

        Only the batch becomes floating point; the samples stay bytes.

        Args:
            positions: int64 (B,), each in 0..len-1, repeats allowed, on any device.
            generator: a CPU generator for the augmentation; None for none of it (evaluation).

        Returns:
            float32 (B, C, H, W) and int64 (B,).

        Raises:
            IndexError: a position lies outside the view (CPU; on other devices torch reports it in its own way).
        """
        positions = positions.to(self._samples.inputs.device)
        chosen = positions if self._indices is None else self._indices[positions]
        images = self._samples.inputs[chosen]
        if generator is not None and self._augment is not None:
            images = self._augment(images, generator)
        inputs = images.to(torch.float32).div_(255).sub_(self._mean).div_(self._std)
        return inputs, self._samples.targets[chosen]


def _checked(indices: Tensor, count: int) -> Tensor:
    """Return ``indices`` as int64 after checking that they are integers (n,) in 0..count-1."""
    if indices.ndim != 1 or indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise DataError(
            f"indices of a view are {indices.dtype} of shape {tuple(indices.shape)}; a vector of integers needed."
        )
    indices = indices.to(torch.int64)
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= count):
        raise DataError(
            f"indices of a view run from {int(indices.min())} to {int(indices.max())}; "
            f"the samples have 0 to {count - 1}."
        )
    return indices

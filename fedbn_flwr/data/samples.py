"""Examples, kept once, and subsets of them, which hold indices but no copy of the examples (torch only).

Images are kept as bytes; features of tables, signals and the like as float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbn_flwr.data.augment import Augment, Draw
from fedbn_flwr.errors import DataError

__all__ = ["Dataset", "Examples", "Samples", "Subset", "check_targets"]


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
        check_targets(self.targets, len(self.inputs), tuple(self.inputs.shape[2:]) if images else ())
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
        return Samples(self.inputs.to(device), self.targets.to(device), groups, units)

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


def check_targets(targets: Tensor, count: int, pixels: tuple[int, ...]) -> None:
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


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A training and a test set of one kind of examples.

    Attributes:
        name: name in the registry of data sets, or the kind and path of own data.
        train: training samples.
        test: test samples.
        num_classes: targets are 0..num_classes - 1; for other tasks the number of the model's outputs.
        mean: mean of the training pixels per channel, pixels scaled to [0, 1]; () if inputs are taken as they are.
        std: standard deviation, in the same way.
        group_names: names of the groups 0, 1, ... of training and test samples; () if there are no groups.
        class_names: names of the classes (labels, target columns) 0, 1, ...; () if they have no names.
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    group_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()

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

    @property
    def label_names(self) -> tuple[str, ...]:
        """A name for each class of a label, its number where it has none; one output may stand for two classes."""
        count = max(self.num_classes, int(self.train.labels.max()) + 1 if len(self.train) else 0)
        return tuple(self.class_names[at] if at < len(self.class_names) else str(at) for at in range(count))

    def normalised(self, mean: Sequence[float], std: Sequence[float]) -> Dataset:
        """Return the same data with another mean and std."""
        return replace(self, mean=tuple(mean), std=tuple(std))


class Subset:
    """The examples of one client or one evaluation: each position 0..len-1 stands for one of shared examples."""

    __slots__ = ("_augment", "_indices", "_mean", "_samples", "_std")

    def __init__(
        self,
        samples: Examples,
        indices: Tensor | npt.NDArray[np.integer[Any]] | None,
        *,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        augment: Augment | None = None,
    ) -> None:
        """Create the subset; no example is copied.

        Args:
            samples: the shared samples.
            indices: integers (n,), the example at each position; None = all examples in order.
            mean: subtracted per channel from pixels scaled to [0, 1], or per feature (channel) of other inputs, where a
                missing value (NaN) becomes the mean; () = other inputs are taken as they are.
            std: divisor per channel or feature, above 0; or ().
            augment: ``batch`` applies it if it gets a generator.

        Raises:
            DataError: indices are not a vector of integers within the samples, or mean and std do not fit.
        """
        channels = samples.shape[0]
        allowed = (channels,) if samples.as_bytes else (0, channels)
        if len(mean) != len(std) or len(mean) not in allowed or not all(value > 0 for value in std):
            what = f"images of {channels} channels" if samples.as_bytes else f"inputs of shape {samples.shape}"
            raise DataError(
                f"mean {tuple(mean)} and std {tuple(std)} do not fit {what}: "
                "one number per channel needed, std above 0."
            )
        device = samples.device
        self._samples = samples
        self._indices = None if indices is None else _checked(torch.as_tensor(indices), len(samples)).to(device)
        form = (-1, *(1 for _ in samples.shape[1:]))
        self._mean = torch.tensor(mean, dtype=torch.float32, device=device).view(form)
        self._std = torch.tensor(std, dtype=torch.float32, device=device).view(form)
        self._augment = augment

    def __len__(self) -> int:
        """Return the number of examples in the subset."""
        return len(self._samples) if self._indices is None else len(self._indices)

    @property
    def samples(self) -> Examples:
        """The shared samples."""
        return self._samples

    @property
    def targets(self) -> Tensor:
        """Targets of the examples, see ``Examples``, on the samples' device."""
        return self._samples.targets if self._indices is None else self._samples.targets[self._indices]

    @property
    def indices(self) -> Tensor:
        """The example at each position, int64 (n,)."""
        return torch.arange(len(self._samples)) if self._indices is None else self._indices

    def scaled(self, mean: Sequence[float], std: Sequence[float]) -> Subset:
        """Return the same examples with another mean and std."""
        return Subset(self._samples, self._indices, mean=mean, std=std, augment=self._augment)

    @property
    def groups(self) -> Tensor | None:
        """Groups of the examples, int64 (n,), on the samples' device; None if the samples have no groups."""
        groups = self._samples.groups
        return groups if groups is None or self._indices is None else groups[self._indices]

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the examples at ``positions``, images as (x / 255 - mean) / std, and their targets.

        Only the batch becomes floating point; images stay bytes.

        Args:
            positions: int64 (B,), each in 0..len-1, repeats allowed, on any device.
            generator: a CPU generator for the augmentation; None = no augmentation (evaluation).

        Returns:
            On the samples' device: float32 (B, C, H, W), or (B, ...) as the inputs are; and int64 (B,), int64 (B, H, W)
            for the classes of pixels, or float32 (B,) or (B, K).

        Raises:
            IndexError: a position is outside the subset (on the CPU; on other devices torch reports it differently).
        """
        chosen, draw = self._request(positions, generator)
        return self._prepared(*self._samples.take(chosen, self._augment, draw))

    def batches(
        self, positions: Iterable[Tensor], generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``batch`` of each of the ``positions``, in order; images on the disk are read ahead."""
        requests = (self._request(batch, generator) for batch in positions)
        for inputs, targets in self._samples.take_each(requests, self._augment):
            yield self._prepared(inputs, targets)

    def _request(self, positions: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Draw | None]:
        """Return the numbers of a batch's examples, and what is drawn for their augmentation."""
        positions = positions.to(self._samples.device)
        chosen = positions if self._indices is None else self._indices.index_select(0, positions)
        if generator is None or self._augment is None:
            return chosen, None
        return chosen, self._augment.draw(len(positions), generator)

    def _prepared(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if inputs.dtype == torch.uint8:
            inputs = inputs.to(torch.float32).div_(255).sub_(self._mean).div_(self._std)
        elif len(self._mean):
            inputs = inputs.sub(self._mean).div_(self._std).nan_to_num_(0.0, float("inf"), float("-inf"))
        return inputs, targets.to(torch.int64) if targets.dtype == torch.uint8 else targets


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

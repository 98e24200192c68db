"""Labelled examples, the shape of images in memory, and data sets.

Images are bytes; rows of tables and signals are float32. A data set has examples to
train on and to test on.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.augment import Augment, Draw


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape that a caller requests from a reader.

    Attributes:
        channels: 1 or 3.
        height: in pixels.
        width: in pixels.
    """

    channels: int
    height: int
    width: int


def in_shape(images: Tensor, shape: Shape, chunk: int = 4096) -> Tensor:
    """Return uint8 images in this shape, computed ``chunk`` images at a time.

    RGB becomes grey by ITU-R 601 luma; grey is repeated over three channels without a
    copy. Images are resized bilinear with antialiasing.
    """
    # Reduce the channels before resizing, or add channels after resizing, so that one
    # channel is resized and not three. Work in chunks, because the computation needs
    # four bytes for each byte.
    size = (shape.height, shape.width)
    if shape.channels < images.shape[1]:
        images = torch.cat([_luma(part) for part in torch.split(images, chunk)])
    if images.shape[2:] != size:
        images = torch.cat(
            [_resized(part, size) for part in torch.split(images, chunk)]
        )
    return images.expand(-1, shape.channels, -1, -1)


def reshaped(samples: Samples, shape: Shape) -> Samples:
    """Return the samples with images in this shape, and pixel targets in its size."""
    # Images that stay in files are decoded in the wanted shape when they are read.
    if not samples.in_memory:
        return samples
    inputs, targets = in_shape(samples.inputs, shape), samples.targets
    size = inputs.shape[2:]
    if targets.ndim == 3 and targets.shape[1:] != size:
        masks = targets.unsqueeze(1)
        targets = F.interpolate(masks, size, mode="nearest-exact").squeeze(1)
    return Samples(inputs, targets, samples.groups, samples.units)


def fitted(samples: Samples, shape: Shape) -> Samples:
    """Return the examples, with images in this shape and others unchanged."""
    return reshaped(samples, shape) if samples.as_bytes else samples


def per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Return a mean or std of pixels for this number of channels."""
    if len(values) in (0, channels):
        return values
    # If the number of channels differs, use the average of the known channels for all
    # of them.
    return (sum(values) / len(values),) * channels


def _luma(images: Tensor) -> Tensor:
    """Return RGB bytes as grey by (299 R + 587 G + 114 B) / 1000, rounded."""
    # Compute in integers, so that every machine gives the same bytes.
    red, green, blue = torch.split(images.to(torch.int32), 1, dim=1)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).to(torch.uint8)


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return uint8 images in the new size."""
    # Compute in float32, because torch's kernels for uint8 round differently on
    # different CPUs.
    resized = F.interpolate(
        images.float(), size, mode="bilinear", align_corners=False, antialias=True
    )
    return resized.round_().clamp_(0, 255).to(torch.uint8)


_TARGETS = (torch.int64, torch.uint8, torch.float32)
UNKNOWN = -1
"""The class of every example of data without targets."""


class LazyInputs(ABC):
    """Inputs of ``Samples`` that are not in memory. Each batch reads its own inputs.

    Attributes:
        shape: (N, ...), of all inputs.
        dtype: uint8 for images, otherwise float32.
        by_pixel: whether ``read`` also returns a class for each pixel or voxel.
        as_given: whether ``read`` returns batches of any structure, for a user's task.
        device: the device of the results of ``read``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    by_pixel: bool
    as_given = False
    device = torch.device("cpu")

    def __len__(self) -> int:
        """Return the number of inputs."""
        return self.shape[0]

    def to(self, device: str | torch.device) -> Self:
        """Return the same inputs, with batches on ``device``."""
        moved = copy.copy(self)
        moved.device = torch.device(device)
        return moved

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Return the inputs with these numbers, and their targets.

        The targets are None if they are not read with the inputs.

        Args:
            numbers: numbers of the inputs, 0..N-1.
        """


class Samples:
    """Labelled examples on one device.

    Attributes:
        source: the inputs: pixels 0..255, uint8, (N, C, H, W), possibly a tensor that
            is expanded (stride 0) over C; or float32 (N, ...), features or signals; or
            a ``LazyInputs`` that reads such inputs for each batch.
        groups: group of each example (a domain, a city, a hospital), int64 (N,), or
            None without groups.
        units: unit of each example, int64 (N,); examples of one unit (a patient) stay
            together in a split. None if every example is its own unit.
    """

    __slots__ = ("_targets", "groups", "source", "units")

    def __init__(
        self,
        inputs: Tensor | LazyInputs,
        targets: Tensor | None,
        groups: Tensor | None = None,
        units: Tensor | None = None,
    ) -> None:
        """Create the samples without a copy.

        Args:
            inputs: the ``source``, see ``Samples``.
            targets: class of each image, int64 (N,); class of each pixel or voxel,
                uint8 (N, H, W) or (N, D, H, W), with 255 for ignored pixels; or float32
                (N,) or (N, K), the target of a regression or labels 0 and 1. None if
                they are read with the inputs.
            groups: see ``Samples``.
            units: see ``Samples``.

        Raises:
            DataError: dtypes or numbers differ from these.
        """
        self.source, self._targets = inputs, targets
        self.groups, self.units = groups, units
        images = inputs.dtype == torch.uint8 and len(inputs.shape) == 4
        numbers = inputs.dtype == torch.float32 and len(inputs.shape) >= 2
        if not images and not numbers:
            raise DataError(
                f"sample inputs are {inputs.dtype} of shape {tuple(inputs.shape)}."
                " Use uint8 (N, C, H, W) for images, float32 (N, ...) for features"
                " and signals."
            )
        if targets is not None and (
            targets.dtype not in _TARGETS or len(targets) != len(inputs)
        ):
            raise DataError(
                f"sample targets are {targets.dtype} of shape {tuple(targets.shape)}"
                f" for {len(inputs)} inputs. Use one target for each input, in int64,"
                " float32, or uint8 for classes of pixels."
            )

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.source)

    def to(self, device: str | torch.device) -> Samples:
        """Return the samples on ``device``, copying only tensors from elsewhere."""
        targets, groups, units = (
            None if part is None else part.to(device)
            for part in (self._targets, self.groups, self.units)
        )
        inputs = self.source
        # The three channels of grey images share their memory. Move one channel and
        # repeat it, instead of moving three.
        if isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.stride(1) == 0:
            moved = inputs[:, :1].to(device).expand_as(inputs)
            return Samples(moved, targets, groups, units)
        return Samples(inputs.to(device), targets, groups, units)

    def regrouped(self, groups: Tensor | None, units: Tensor | None = None) -> Samples:
        """Return the same examples with other groups and units."""
        return Samples(self.source, self._targets, groups, units)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example, (C, H, W) for images."""
        return tuple(self.source.shape[1:])

    @property
    def inputs(self) -> Tensor:
        """The inputs, if they are in memory."""
        if isinstance(self.source, LazyInputs):
            raise DataError(
                "the inputs are not in memory, since each batch reads its own. Read"
                " them with take()."
            )
        return self.source

    @property
    def in_memory(self) -> bool:
        """Whether the inputs are in memory."""
        return isinstance(self.source, Tensor)

    @property
    def as_given(self) -> bool:
        """Whether batches have any structure, for a user's task."""
        return isinstance(self.source, LazyInputs) and self.source.as_given

    @property
    def as_bytes(self) -> bool:
        """Whether examples are images as bytes."""
        return self.source.dtype == torch.uint8

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return self.source.device

    @property
    def by_pixel(self) -> bool:
        """Whether targets are the classes of pixels (segmentation)."""
        if isinstance(self.source, LazyInputs):
            return self.source.by_pixel
        return self.targets.dtype == torch.uint8

    @property
    def by_class(self) -> bool:
        """Whether every example has one class."""
        return self._targets is not None and self._targets.dtype == torch.int64

    @property
    def labelled(self) -> bool:
        """Whether the examples have targets."""
        return not self.by_class or bool((self.labels != UNKNOWN).all())

    @property
    def targets(self) -> Tensor:
        """Target of each example. This may read all inputs."""
        if self._targets is None:
            return self.take(torch.arange(len(self)))[1]
        return self._targets

    @property
    def labels(self) -> Tensor:
        """The class of each example for splits, int64 (N,). Without classes, all 0."""
        if self.by_class:
            return self.targets
        return torch.zeros(len(self), dtype=torch.int64, device=self.device)

    def take(
        self, chosen: Tensor, augment: Augment | None = None, draw: Draw | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the ``chosen`` examples, maybe augmented.

        Args:
            chosen: indices of the examples, int64 (B,).
            augment: the augmentation; None for unchanged examples.
            draw: the random draws of ``augment`` for this batch.
        """
        if isinstance(self.source, LazyInputs):
            inputs, read = self.source.read(chosen.tolist())
            targets = self.targets.index_select(0, chosen) if read is None else read
        else:
            # Use index_select, because indexing with [] takes several times as long for
            # a batch.
            inputs = self.source.index_select(0, chosen)
            targets = self.targets.index_select(0, chosen)
        if augment is not None and draw is not None:
            inputs, targets = augment.apply(inputs, targets, draw)
        return inputs, targets


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A training and a test set of one kind of examples.

    Attributes:
        name: name in the registry of data sets, or the kind and path of own data.
        train: training samples.
        test: test samples.
        num_classes: targets are 0..num_classes - 1; for other tasks the number of the
            model's outputs.
        mean: mean of the training pixels per channel, pixels scaled to [0, 1]; () if
            inputs are used unchanged.
        std: standard deviation, in the same way.
        group_names: names of the groups 0, 1, ... of training and test samples; ()
            without groups.
        class_names: names of the classes (labels, target columns) 0, 1, ...; () if they
            have no names.
    """

    name: str
    train: Samples
    test: Samples
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    group_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The name of each class of a label, or its number without a name."""
        # Take the larger of the number of outputs and the number of labels, because a
        # model with a single output can distinguish two classes.
        count = self.num_classes
        if len(self.train):
            count = max(count, int(self.train.labels.max()) + 1)
        known = self.class_names[:count]
        return known + tuple(str(at) for at in range(len(known), count))

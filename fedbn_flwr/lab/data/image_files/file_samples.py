"""Labelled images on the disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fedbn_flwr.lab.data.augment import Augment, Draw
from fedbn_flwr.lab.data.image_files.file_set import FileSet
from fedbn_flwr.lab.data.image_files.workers import Batch, Request

__all__ = ["FileSamples"]


class FileSamples:
    """Labelled images on the disk; see ``data.samples.Examples``.

    Args:
        files: the files, shared with other samples.
        numbers: the files of these samples, int64 (N,).
        labels: class of each image, int64 (N,); None if the files have classes of pixels.
        groups: group of each image, int64 (N,), or None.
        units: unit of each image, int64 (N,), or None.
        device: of what ``take`` returns.
    """

    def __init__(
        self,
        files: FileSet,
        numbers: Tensor,
        labels: Tensor | None,
        groups: Tensor | None = None,
        units: Tensor | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.files, self.numbers = files, numbers
        self.device = torch.device(device)
        self._labels, self.groups, self.units = (
            None if part is None else part.to(self.device) for part in (labels, groups, units)
        )

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of an image."""
        return self.files.shape

    @property
    def as_bytes(self) -> bool:
        """Images are bytes."""
        return True

    @property
    def by_pixel(self) -> bool:
        """Whether targets are the classes of pixels."""
        return self._labels is None

    @property
    def by_class(self) -> bool:
        """Whether every image has one class."""
        return self._labels is not None

    @property
    def targets(self) -> Tensor:
        """Class of each image, or of each pixel, which reads all files."""
        return self.take(torch.arange(len(self)))[1] if self._labels is None else self._labels

    @property
    def labels(self) -> Tensor:
        """The class of each image for splits over clients, int64 (N,); all 0 if targets are classes of pixels."""
        return torch.zeros(len(self), dtype=torch.int64, device=self.device) if self._labels is None else self._labels

    def regrouped(self, groups: Tensor | None, units: Tensor | None = None) -> FileSamples:
        """Return the same images with other groups and units."""
        return FileSamples(self.files, self.numbers, self._labels, groups, units, self.device)

    def to(self, device: str | torch.device) -> FileSamples:
        """Return the same samples, whose batches come on ``device``."""
        return FileSamples(self.files, self.numbers, self._labels, self.groups, self.units, device)

    def take(self, chosen: Tensor, augment: Augment | None = None, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return the images at these numbers and their targets, augmented by what was drawn; this process decodes."""
        return self._batch(self.files.read(*self._request(chosen, augment, draw)), chosen, augment, draw)

    def take_each(
        self, requests: Iterable[tuple[Tensor, Draw | None]], augment: Augment | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``take`` of each request; worker processes decode some requests ahead."""
        asked: deque[tuple[Tensor, Draw | None]] = deque()

        def each() -> Iterator[Request]:
            for request in requests:
                asked.append(request)
                yield self._request(request[0], augment, request[1])

        for read in self.files.ahead(each()):
            chosen, draw = asked.popleft()
            yield self._batch(read, chosen, augment, draw)

    def _request(self, chosen: Tensor, augment: Augment | None, draw: Draw | None) -> Request:
        """Return what to read: the numbers of the files, and for augmented images what is done to each."""
        numbers = self.numbers[chosen.cpu()].tolist()
        if augment is None or draw is None or draw.seeds is None:
            return numbers, (), ()
        return numbers, augment.each, draw.seeds.tolist()

    def _batch(self, read: Batch, chosen: Tensor, augment: Augment | None, draw: Draw | None) -> tuple[Tensor, Tensor]:
        """Return what was read, and its targets, on the device; augmented by what is done to a whole batch."""
        inputs = torch.from_numpy(read[0]).to(self.device)
        if self._labels is not None:
            targets = self._labels.index_select(0, chosen.to(self.device))
        else:
            targets = torch.from_numpy(read[1]).to(self.device)
        return (inputs, targets) if augment is None or draw is None else augment.apply(inputs, targets, draw)

"""A set of image files: decoded, brought into one shape, and kept while there is room."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.augment import transform_image
from fedbn_flwr.lab.data.image_files.cache import ImageCache
from fedbn_flwr.lab.data.image_files.decoding import Bytes, Window, for_all, pixels
from fedbn_flwr.lab.data.image_files.inspection import refuse_damaged
from fedbn_flwr.lab.data.image_files.workers import Batch, Request, WorkerPool
from fedbn_flwr.lab.data.samples import Samples
from fedbn_flwr.lab.data.shapes import Shape, reshaped

__all__ = ["FileSet"]


class FileSet:
    """Image files, decoded to bytes of one shape; with classes of pixels from mask files if there are some.

    Attributes:
        shape: (C, H, W) of the images.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        shape: Shape,
        *,
        centre: bool = False,
        masks: Sequence[Path] = (),
        mask_table: Bytes | None = None,
        window: Window | None = None,
    ) -> None:
        """Create the set; see ``hold``. No file is read."""
        # As arrays: a process that is forked would copy a list of names bit by bit, by counting references.
        self._paths, self._masks = _names(paths), _names(masks)
        self._wanted, self._centre, self._table, self._window = shape, centre, mask_table, window
        self.shape = (shape.channels, shape.height, shape.width)
        self._workers = WorkerPool(shape.workers)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._paths)

    @property
    def has_masks(self) -> bool:
        """Whether there are classes of pixels."""
        return len(self._masks) > 0

    @property
    def image_bytes(self) -> int:
        """The memory of a decoded image and the classes of its pixels."""
        channels, height, width = self.shape
        return (channels + self.has_masks) * height * width

    def read(self, numbers: Sequence[int], each: Sequence[str] = (), seeds: Sequence[int] = ()) -> Batch:
        """Return images, uint8 (B, C, H, W), and the classes of their pixels, uint8 (B, H, W), or None.

        Args:
            numbers: of the files.
            each: transforms of single images, see ``data.augment``; with a seed for each image.
            seeds: the seeds, or () for no transform.

        Raises:
            DataError: a file is damaged; the message names it.
        """
        images = np.empty((len(numbers), *self.shape), np.uint8)
        masks = np.empty((len(numbers), *self.shape[1:]), np.uint8) if self.has_masks else None
        for at, number in enumerate(numbers):
            image, mask = self._stored(number)
            if seeds:
                image, mask = transform_image(image, mask, each, (self.shape[1], self.shape[2]), seeds[at])
            image, mask = self._fitted(image, mask)
            images[at] = image.numpy()
            if masks is not None and mask is not None:
                masks[at] = mask.numpy()
        return images, masks

    def read_all(self) -> tuple[Tensor, Tensor | None]:
        """Return all images and classes of pixels; several threads decode them.

        Raises:
            DataError: files are damaged; the message names all of them.
        """
        inputs = torch.empty(len(self), *self.shape, dtype=torch.uint8)
        targets = torch.empty(len(self), *self.shape[1:], dtype=torch.uint8) if self.has_masks else None
        damaged: dict[int, str] = {}

        def read(number: int) -> None:
            try:
                image, mask = self._fitted(*self._decoded(number))
            except DataError as error:
                damaged[number] = str(error)
                return
            inputs[number] = image
            if targets is not None and mask is not None:
                targets[number] = mask

        for_all(len(self), read)
        refuse_damaged(damaged)
        return inputs, targets

    def ahead(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield ``read`` of each request, in order; worker processes read some requests ahead.

        Raises:
            DataError: a file is damaged, or a worker process has ended.
        """
        return self._workers.read(self, requests)

    @functools.cached_property
    def cache(self) -> ImageCache:
        """The cache, which processes that are forked after its first use share."""
        return ImageCache(len(self), self._wanted.max_bytes)

    def _stored(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return what is kept of an image: as decoded if ``Shape.originals``, else in its final shape."""
        if (kept := self.cache.get(number)) is not None:
            whole = torch.from_numpy(kept)
            return (whole[:-1], whole[-1]) if self.has_masks else (whole, None)
        image, mask = self._decoded(number)
        if not self._wanted.originals:
            image, mask = self._fitted(image, mask)
        self.cache.put(number, (image if mask is None else torch.cat([image, mask[None]])).numpy())
        return image, mask

    def _decoded(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return one image as RGB bytes, (3, H, W), and the classes of its pixels, (H, W)."""
        image = pixels(os.fsdecode(self._paths[number]), window=self._window)
        if not self.has_masks:
            return image, None
        path = os.fsdecode(self._masks[number])
        mask = pixels(path, "")
        if mask.shape[1:] != image.shape[1:]:
            raise DataError(
                f"labels {path} are of {mask.shape[2], mask.shape[1]} pixels, the image of "
                f"{image.shape[2], image.shape[1]}."
            )
        classes = mask[0]
        return image, classes if self._table is None else torch.from_numpy(self._table[classes.numpy()])

    def _fitted(self, image: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return an image and classes of pixels in the shape of the set; the same ones if they have it."""
        if tuple(image.shape) == self.shape:
            return image, mask
        if self._centre and tuple(image.shape[1:]) != self.shape[1:]:
            side = min(image.shape[1:])
            top, left = ((extent - side) // 2 for extent in image.shape[1:])
            image = image[:, top : top + side, left : left + side]
        image = reshaped(Samples(image[None], torch.zeros(1, dtype=torch.int64)), self._wanted).inputs[0]
        if mask is not None and tuple(mask.shape) != self.shape[1:]:
            mask = F.interpolate(mask[None, None], self.shape[1:], mode="nearest-exact")[0, 0]
        return image, mask


def _names(paths: Sequence[Path]) -> npt.NDArray[np.bytes_]:
    return np.array([os.fsencode(path) for path in paths], np.bytes_)

"""Image files as inputs, decoded at each use or once for all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.augment import transform_image
from fedbn_flwr.lab.data.image_files.damage import refuse_damaged
from fedbn_flwr.lab.data.image_files.decoding import Bytes, for_all, pixels
from fedbn_flwr.lab.data.samples import LazyInputs, Samples, Shape, reshaped


class ImageFiles(LazyInputs):
    """Image files, decoded to bytes of one shape.

    Masks give the classes of pixels.
    """

    dtype = torch.uint8

    def __init__(
        self,
        paths: Sequence[Path],
        shape: Shape,
        *,
        centre: bool = False,
        masks: Sequence[Path] = (),
        mask_table: Bytes | None = None,
    ) -> None:
        """Create the inputs without reading a file, see ``open_images``."""
        self._paths, self._masks = paths, masks
        self._wanted, self._centre, self._table = shape, centre, mask_table
        self.shape = (len(paths), shape.channels, shape.height, shape.width)
        self.by_pixel = len(masks) > 0

    def read(
        self,
        numbers: Sequence[int],
        each: Sequence[str] = (),
        seeds: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Return uint8 images and the classes of their pixels, or None without masks.

        The classes are uint8 (B, H, W).

        Raises:
            DataError: a file is damaged; the message names it.
        """
        images, masks = self._empty(len(numbers))
        # Only decode in several threads. The steps below use torch's own threads. A
        # forked process must not start torch's threads in another thread.
        decoded = for_all(len(numbers), lambda at: self._decoded(numbers[at]))
        for at, (image, mask) in enumerate(decoded):
            # Transforms get images of the wanted size, as if the images were in memory.
            # If a transform cuts out a part of an image, it gets the original image. In
            # both cases, the result is resized below.
            if not self._wanted.originals:
                image, mask = self._fitted(image, mask)
            if seeds:
                size = (self.shape[2], self.shape[3])
                image, mask = transform_image(image, mask, each, size, seeds[at])
            image, mask = self._fitted(image, mask)
            images[at] = image
            if masks is not None and mask is not None:
                masks[at] = mask
        return images.to(self.device), None if masks is None else masks.to(self.device)

    def read_all(self) -> tuple[Tensor, Tensor | None]:
        """Return all images and classes of pixels, decoded by several threads.

        Raises:
            DataError: files are damaged; the message names all of them.
        """
        inputs, targets = self._empty(len(self))
        # Collect the problems of all files and report them together, so that a user can
        # repair all files before the next try.
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

    def _empty(self, count: int) -> tuple[Tensor, Tensor | None]:
        images = torch.empty(count, *self.shape[1:], dtype=torch.uint8)
        if not self.by_pixel:
            return images, None
        return images, torch.empty(count, *self.shape[2:], dtype=torch.uint8)

    def _decoded(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return one image as RGB bytes, (3, H, W), and its classes, (H, W)."""
        image = pixels(str(self._paths[number]))
        if not self.by_pixel:
            return image, None
        path = str(self._masks[number])
        mask = pixels(path, "")
        if mask.shape[1:] != image.shape[1:]:
            raise DataError(
                f"labels {path} have {mask.shape[2], mask.shape[1]} pixels, but the"
                f" image has {image.shape[2], image.shape[1]}."
            )
        classes = mask[0]
        if self._table is not None:
            classes = torch.from_numpy(self._table[classes.numpy()])
        return image, classes

    def _fitted(
        self, image: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return an image and its classes of pixels in the shape of the set."""
        shape = self.shape[1:]
        if image.shape == shape:
            return image, mask
        if self._centre and image.shape[1:] != shape[1:]:
            side = min(image.shape[1:])
            top, left = ((extent - side) // 2 for extent in image.shape[1:])
            image = image[:, top : top + side, left : left + side]
        # Convert the image as a data set of one image, because images in memory are
        # converted in this way. The results are equal, bit for bit.
        alone = Samples(image[None], torch.zeros(1, dtype=torch.int64))
        image = reshaped(alone, self._wanted).inputs[0]
        # Take the class of the nearest pixel, because classes have no average.
        if mask is not None and mask.shape != shape[1:]:
            resized = F.interpolate(mask[None, None], shape[1:], mode="nearest-exact")
            mask = resized[0, 0]
        return image, mask

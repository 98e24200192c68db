"""Image files as inputs, decoded at each use or once for all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.augment import transform_image
from fedbn_flwr.lab.data.image_files.damage import refuse_damaged
from fedbn_flwr.lab.data.image_files.decoding import for_all, pixels
from fedbn_flwr.lab.data.samples import LazyInputs, Samples, Shape, reshaped


class ImageFiles(LazyInputs):
    """Image files, decoded to bytes of one shape."""

    dtype = torch.uint8
    by_pixel = False

    def __init__(
        self, paths: Sequence[Path], shape: Shape, *, centre: bool = False
    ) -> None:
        """Create the inputs without reading a file, see ``open_images``."""
        self._paths, self._wanted, self._centre = paths, shape, centre
        self.shape = (len(paths), shape.channels, shape.height, shape.width)

    def read(
        self,
        numbers: Sequence[int],
        each: Sequence[str] = (),
        seeds: Sequence[int] = (),
    ) -> tuple[Tensor, None]:
        """Return uint8 images.

        Raises:
            DataError: a file is damaged; the message names it.
        """
        images = self._empty(len(numbers))
        # Only decode in several threads. The steps below use torch's own threads. A
        # forked process must not start torch's threads in another thread.
        decoded = for_all(len(numbers), lambda at: self._decoded(numbers[at]))
        for at, image in enumerate(decoded):
            # Transforms get images of the wanted size, as if the images were in memory.
            # If a transform cuts out a part of an image, it gets the original image. In
            # both cases, the result is resized below.
            if not self._wanted.originals:
                image = self._fitted(image)
            if seeds:
                size = (self.shape[2], self.shape[3])
                image, _ = transform_image(image, None, each, size, seeds[at])
            images[at] = self._fitted(image)
        return images.to(self.device), None

    def read_all(self) -> Tensor:
        """Return all images, decoded by several threads.

        Raises:
            DataError: files are damaged; the message names all of them.
        """
        inputs = self._empty(len(self))
        # Collect the problems of all files and report them together, so that a user can
        # repair all files before the next try.
        damaged: dict[int, str] = {}

        def read(number: int) -> None:
            try:
                inputs[number] = self._fitted(self._decoded(number))
            except DataError as error:
                damaged[number] = str(error)

        for_all(len(self), read)
        refuse_damaged(damaged)
        return inputs

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, *self.shape[1:], dtype=torch.uint8)

    def _decoded(self, number: int) -> Tensor:
        """Return one image as RGB bytes, (3, H, W)."""
        return pixels(str(self._paths[number]))

    def _fitted(self, image: Tensor) -> Tensor:
        """Return an image in the shape of the set."""
        shape = self.shape[1:]
        if image.shape == shape:
            return image
        if self._centre and image.shape[1:] != shape[1:]:
            side = min(image.shape[1:])
            top, left = ((extent - side) // 2 for extent in image.shape[1:])
            image = image[:, top : top + side, left : left + side]
        # Convert the image as a data set of one image, because images in memory are
        # converted in this way. The results are equal, bit for bit.
        alone = Samples(image[None], torch.zeros(1, dtype=torch.int64))
        return reshaped(alone, self._wanted).inputs[0]

"""Image files as examples, in memory or on the disk.

``open_images`` decodes a set that fits into ``MAX_BYTES`` once, into memory. A larger
set stays on the disk, and each batch decodes its own images. Both ways give the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.samples import LazyInputs, Samples, Shape, in_shape
from fedbn_flwr.machine import num_cores

Item = TypeVar("Item")
Result = TypeVar("Result")
Files = list[tuple[Path, int]]
"""Image files and the class of each."""

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

MAX_BYTES = 4 * 2**30
"""Image files with more decoded bytes stay on the disk."""

_MODES = (
    "1",
    "L",
    "LA",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBX",
    "CMYK",
    "YCbCr",
    "HSV",
    "LAB",
)
"""Pillow's modes of images whose pixels are bytes."""

# the last bytes of a complete file of each format; a file that was cut off lacks them
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}

# largest number of futures that exist at the same time
_CHUNK = 4096


def open_images(
    train: Files, test: Files, shape: Shape, *, centre: bool = False
) -> Loaded:
    """Return the images in this shape, in the order of the files.

    Args:
        train: image files. Every colour mode becomes RGB first; grey is computed from
            RGB.
        test: further image files. Both parts are in memory, or none of them.
        shape: shape of the images.
        centre: cut out the central square before resizing; otherwise the whole image
            is resized to the shape.

    Raises:
        DataError: files are damaged; the message names them. If the set stays on the
            disk, only headers and ends are checked.
    """
    size = (len(train) + len(test)) * shape.channels * shape.height * shape.width
    in_memory = size <= MAX_BYTES
    samples, problems = list[Samples](), list[str]()
    for files in (train, test):
        paths = [path for path, _ in files]
        labels = torch.tensor([label for _, label in files], dtype=torch.int64)
        inputs = ImageFiles(paths, shape, centre=centre)
        if in_memory:
            samples.append(Samples(inputs.read_all(problems), labels))
        # Large images stay on the disk. Find damaged files now, not in the middle of a
        # run.
        else:
            problems += for_all(_problem_of, paths)
            samples.append(Samples(inputs, labels))
    _refuse(problems)
    return Loaded(samples[0], samples[1])


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

    def read(self, numbers: Sequence[int]) -> tuple[Tensor, None]:
        """Return uint8 images.

        Raises:
            DataError: a file is damaged; the message names it.
        """
        images = self._empty(len(numbers))
        # Only decode in several threads. The steps below use torch's own threads. A
        # forked process must not start torch's threads in another thread.
        decoded = for_all(pixels, [self._paths[number] for number in numbers])
        for at, image in enumerate(decoded):
            images[at] = self._fitted(image)
        return images.to(self.device), None

    def read_all(self, problems: list[str]) -> Tensor:
        """Return all images, decoded by several threads.

        ``problems`` gets the problem of each damaged file, so that a user can repair
        all files before the next try.
        """
        inputs = self._empty(len(self))

        def read(number: int) -> str:
            try:
                inputs[number] = self._fitted(pixels(self._paths[number]))
            except DataError as error:
                return str(error)
            return ""

        problems += for_all(read, range(len(self)))
        return inputs

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, *self.shape[1:], dtype=torch.uint8)

    def _fitted(self, image: Tensor) -> Tensor:
        """Return an image in the shape of the set."""
        height, width = image.shape[1:]
        if self._centre and (height, width) != self.shape[2:]:
            side = min(height, width)
            top, left = (height - side) // 2, (width - side) // 2
            image = image[:, top : top + side, left : left + side]
        return in_shape(image[None], self._wanted)[0]


def pixels(path: Path) -> Tensor:
    """Return one image as RGB bytes, (3, H, W).

    Raises:
        DataError: the file cannot be read as an image with 8-bit channels.
    """
    with _opened(path) as image:
        _check_mode(image)
        # Convert a palette with transparency to RGBA first, because Pillow would
        # otherwise print a warning without the name of the file.
        if image.mode == "P" and image.has_transparency_data:
            image = image.convert("RGBA")
        values = np.array(image.convert("RGB"), dtype=np.uint8)
    return torch.from_numpy(values).permute(2, 0, 1)


def size_of(path: Path) -> tuple[int, int] | None:
    """Return an image's width and height from its header, or None if unreadable."""
    try:
        with _opened(path) as image:
            size: tuple[int, int] = image.size
            return size
    except DataError:
        return None


def refuse_damaged_files(paths: Sequence[Path]) -> None:
    """Raise DataError if a header, or the end of a JPEG or PNG file, looks damaged."""
    _refuse(for_all(_problem_of, paths))


def _refuse(problems: Sequence[str]) -> None:
    """Raise DataError with the first ten problems. Sound files have the problem ""."""
    found = [problem for problem in problems if problem]
    if found:
        first = f"{len(found)} image files cannot be read. Repair or remove them:"
        raise DataError("\n".join([first, *found[:10]]))


def _problem_of(path: Path) -> str:
    """Return the reason why a file cannot be read, or "" if it looks sound."""
    try:
        with _opened(path) as image:
            _check_mode(image)
            # Decode the whole file if it ends in other bytes: it may be cut off, or
            # have more bytes after the image.
            end = _ENDS.get(image.format, b"")
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 64))
                if end not in file.read():
                    image.load()
    except DataError as error:
        return str(error)
    return ""


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Yield Pillow's open image.

    Raises:
        DataError: the image cannot be read.
    """
    # Import here, because few processes read image files.
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    # Pillow's readers raise these exceptions for damaged files.
    except (
        OSError,
        ValueError,
        SyntaxError,
        RuntimeError,
        Image.DecompressionBombError,
    ) as error:
        raise DataError(f"image {path} cannot be read: {error}") from error


def _check_mode(image: Any) -> None:
    """Raise ValueError unless Pillow's open image has one page with 8-bit channels."""
    # Accept several pages in a telephone's JPEG (MPO), because the second page is only
    # a thumbnail or a depth map.
    pages = getattr(image, "n_frames", 1)
    if pages > 1 and image.format != "MPO":
        raise ValueError(
            f"it has {pages} pages or frames. Save one page as the file, or read all"
            " pages in your own function, dataset=module:function"
        )
    # Pillow silently reduces colours of 16 bits to 8 bits. The mode is then the mode of
    # 8 bits, so look for 16 bits in ``tile``.
    if image.mode not in _MODES or ";16" in str(getattr(image, "tile", "")):
        raise ValueError(
            f"its channels are not bytes (mode {image.mode}). Save it with 8 bits for"
            " each channel, or read it in your own function,"
            " dataset=module:function"
        )


def for_all(act: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of ``act`` for all items, computed in several threads."""
    # Use threads, because Pillow releases Python's lock while it decodes.
    results = list[Result]()
    with ThreadPoolExecutor(min(8, num_cores())) as pool:
        # A million futures at the same time would need a gigabyte.
        for start in range(0, len(items), _CHUNK):
            results += pool.map(act, items[start : start + _CHUNK])
    return results

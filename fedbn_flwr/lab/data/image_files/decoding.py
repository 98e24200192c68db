"""The pixels of an image file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.machine import num_cores

Result = TypeVar("Result")

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

# largest number of futures that exist at the same time
_CHUNK = 4096


def pixels(path: str) -> Tensor:
    """Return one image as RGB bytes, (3, H, W).

    Raises:
        DataError: the file cannot be read as an image with 8-bit channels.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            check_mode(image)
            # Convert a palette with transparency to RGBA first, because Pillow would
            # otherwise print a warning without the name of the file.
            picture: Image.Image = image
            if image.mode == "P" and image.has_transparency_data:
                picture = image.convert("RGBA")
            values = np.array(picture.convert("RGB"), dtype=np.uint8)
    # Pillow's readers raise these exceptions for damaged files.
    except (
        OSError,
        ValueError,
        SyntaxError,
        RuntimeError,
        Image.DecompressionBombError,
    ) as error:
        raise DataError(f"image {path} cannot be read: {error}") from error
    return torch.from_numpy(values).permute(2, 0, 1)


def size_of(path: Path) -> tuple[int, int] | None:
    """Return an image's width and height from its header, or None if unreadable."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def is_transparent(path: Path) -> bool:
    """Return whether an image has transparent pixels."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if not image.has_transparency_data:
                return False
            alpha: Any = image.convert("RGBA").getchannel("A")
            return bool(alpha.getextrema()[0] < 255)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False


def check_mode(image: Any) -> None:
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


def for_all(count: int, act: Callable[[int], Result]) -> list[Result]:
    """Return the results of ``act`` for 0..count - 1, computed in several threads."""
    # Use threads, because Pillow releases Python's lock while it decodes.
    results = list[Result]()
    with ThreadPoolExecutor(min(8, num_cores())) as pool:
        # A million futures at the same time would need a gigabyte.
        for start in range(0, count, _CHUNK):
            results += pool.map(act, range(start, min(start + _CHUNK, count)))
    return results

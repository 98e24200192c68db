"""The pixels of an image file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.machine import num_cores

__all__ = [
    "DEEP",
    "FULL",
    "MODES",
    "Bytes",
    "Window",
    "as_bytes",
    "check_depth",
    "deep_values",
    "for_all",
    "is_deep",
    "pixels",
]

Bytes = npt.NDArray[np.uint8]
Result = TypeVar("Result")

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""Pillow's modes of images whose pixels are bytes."""

DEEP = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")
"""Pillow's modes of grey images whose pixels have more bits."""

Window = tuple[float, float]
"""The values of deep images that become 0 and 255."""

FULL: Window = (0.0, 65535.0)
"""That of images of 16 bits, where none is stated."""

_CHUNK = 4096


def pixels(path: str, mode: str = "RGB", window: Window | None = None) -> Tensor:
    """Return one image as bytes, (C, H, W): RGB, or as they are (for example the numbers of a palette).

    Args:
        path: the file.
        mode: Pillow's mode of the result; "" = as they are, which must be bytes.
        window: the values that become 0 and 255 where a channel has more than 8 bits; None = 0 and 65,535.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            if mode and is_deep(image):
                values = np.array(Image.fromarray(as_bytes(deep_values(path, image), window)).convert(mode))
            else:
                check_mode(image)
                values = np.array(image.convert(mode) if mode else image, dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError) as error:  # damaged files
        raise DataError(f"image {path} cannot be read: {error}") from error
    return torch.from_numpy(values if values.ndim == 3 else values[:, :, None]).permute(2, 0, 1)


def is_deep(image: Any) -> bool:
    """Return whether a channel of Pillow's open image has more than 8 bits, of which Pillow keeps 8 for colours."""
    return image.mode in DEEP or ";16" in str(getattr(image, "tile", ""))


def deep_values(path: str, image: Any) -> npt.NDArray[Any]:
    """Return the values of an image with more than 8 bits a channel, (H, W) or (H, W, 3), without alpha.

    Raises:
        ValueError: they are colours in another format than PNG, or numbers that are not finite.
    """
    if image.mode not in MODES:
        values: npt.NDArray[Any] = np.asarray(image)
        if not np.isfinite(values).all():
            raise ValueError("some of its values are not finite")
        return values
    if image.format != "PNG":
        raise ValueError(
            "its colours have 16 bits for each channel, which are read from PNG alone; save it as PNG, or with 8"
        )
    from torchvision.io import ImageReadMode, decode_image, read_file

    channels: npt.NDArray[Any] = decode_image(read_file(path), ImageReadMode.UNCHANGED).numpy()
    return channels[:3].transpose(1, 2, 0) if len(channels) > 2 else channels[0]


def as_bytes(values: npt.NDArray[Any], window: Window | None) -> Bytes:
    """Return values as bytes: those up to the window's low end are 0, from the high end on 255, rounded between."""
    low, high = window or FULL
    return np.rint((values.astype(np.float64) - low) * (255 / (high - low))).clip(0, 255).astype(np.uint8)


def check_mode(image: Any) -> None:
    """Raise ValueError unless the pixels of Pillow's image are bytes."""
    if image.mode not in MODES:
        raise ValueError(f"its pixels are not bytes (mode {image.mode}); save it with 8 bits for each channel")


def check_depth(image: Any, window: Window | None) -> None:
    """Raise ValueError unless the pixels of Pillow's image are bytes, or it is known which values are dark and bright.

    Those of 16 bits are 0 to 65,535, of 32 bits what the window says.
    """
    if is_deep(image):
        if window is None and image.mode in ("I", "F") and image.format != "PPM":  # Pillow brings these to 65,535
            raise ValueError(
                f"its pixels are numbers of 32 bits (mode {image.mode}): say which are dark and bright with "
                "intensity-range=LOW,HIGH"
            )
    else:
        check_mode(image)


def for_all(count: int, act: Callable[[int], Result]) -> list[Result]:
    """Return ``act`` of the numbers below ``count``, in several threads: Pillow decodes outside of Python's lock."""
    results = list[Result]()
    with ThreadPoolExecutor(min(8, num_cores())) as pool:
        for start in range(0, count, _CHUNK):  # a million futures at the same time would need a gigabyte
            results += pool.map(act, range(start, min(start + _CHUNK, count)))
    return results

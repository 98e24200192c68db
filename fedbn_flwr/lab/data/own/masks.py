"""Classes of pixels: which values masks have, and whether they are classes at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.own.records import Targets
from fedbn_flwr.lab.data.own.request import OwnData, chosen_task, shown, warning_of_gaps
from fedbn_flwr.training.tasks import SEGMENTATION

__all__ = ["PixelValues", "look_at_masks", "pixel_targets"]

_MOST_SCATTERED = 4  # values that no object has: more of them are no accident
_IGNORED = SEGMENTATION.ignore


class PixelValues:
    """The values of masks: how many pixels have each, and how many of these are in a block of 2 x 2 equal ones.

    Interpolation and JPEG write values between those of two classes along their border. The pixels of a class form
    blocks, those values do not.
    """

    def __init__(self) -> None:
        self._counts, self._in_blocks = np.zeros(256, np.int64), np.zeros(256, np.int64)

    def add(self, mask: Any) -> None:
        """Count the values of a mask, uint8 (H, W)."""
        down, right, across = (mask[a, b] for a, b in ((_LAST, _FIRST), (_FIRST, _LAST), (_LAST, _LAST)))
        equal = (mask[_FIRST, _FIRST] == down) & (down == right) & (right == across)
        block = np.zeros(mask.shape, bool)
        for rows in (_FIRST, _LAST):
            for columns in (_FIRST, _LAST):
                block[rows, columns] |= equal
        self._counts += np.bincount(mask.ravel(), minlength=256)
        self._in_blocks += np.bincount(mask[block], minlength=256)

    @property
    def present(self) -> list[int]:
        """The values, in their order."""
        return [int(value) for value in np.flatnonzero(self._counts)]

    def problem(self) -> str:
        """Return why the values are no classes: most are scattered pixels between few that form areas; else ""."""
        scattered = (self._counts > 0) & (4 * self._in_blocks < self._counts)
        areas = np.flatnonzero((self._counts > 0) & ~scattered)
        number, pixels = int(scattered.sum()), int(self._counts[scattered].sum())
        if number <= _MOST_SCATTERED or number <= len(areas) or 4 * pixels > 3 * self._counts.sum():
            return ""
        return (
            f"the masks were resized or compressed with loss: {number} of their {len(self.present)} values are single "
            f"pixels between areas of {shown([str(value) for value in areas])}. Resize masks with nearest, and save "
            "them as PNG with the classes 0, 1, ..."
        )


_FIRST, _LAST = slice(None, -1), slice(1, None)


def look_at_masks(paths: Sequence[Path], masks: Sequence[Path], problems: dict[int, str]) -> PixelValues:
    """Return the values in the masks.

    Masks that cannot be read, have several channels, or not the size of their image are added to ``problems``.
    """
    values = PixelValues()
    for number, mask in enumerate(masks):
        try:
            pixels = _mask_pixels(mask, None if number in problems else paths[number])
        except (OSError, ValueError, SyntaxError) as error:
            problems[number] = f"mask {mask} cannot be read: {error}"
        else:
            values.add(pixels.astype(np.uint8))
    return values


def _mask_pixels(mask: Path, image: Path | None) -> Any:
    """Return the pixels of a mask; ValueError unless each is a byte, and the mask has the size of the image."""
    from PIL import Image

    with Image.open(mask) as file:
        pixels = np.array(file)
    if pixels.ndim != 2 or pixels.dtype not in (np.uint8, np.bool_):
        raise ValueError(f"{pixels.dtype} of shape {pixels.shape}; one byte a pixel, its class, needed")
    if image is not None:
        with Image.open(image) as file:
            width, height = file.size
        # A TIFF may be turned when it is read: reading refuses one whose mask is not.
        if sorted((width, height)) != sorted(pixels.shape):
            raise ValueError(
                f"it is of {pixels.shape[1]} x {pixels.shape[0]} pixels, its image of {width} x {height}; save both "
                "in one size"
            )
    return pixels


def pixel_targets(request: OwnData, targets: Any, values: PixelValues) -> Targets:
    """Return the classes of pixels: files, or uint8 (N, H, W), with these values.

    Raises:
        ConfigError: the task or the number of classes does not fit.
        DataError: the values are no classes.
    """
    classes = [value for value in values.present if value != _IGNORED]
    largest = max(classes, default=0)
    task = chosen_task(request, "segmentation", ("segmentation",))
    lossy = values.problem()
    if request.num_classes <= largest:
        if lossy:
            raise request.problem(lossy)
        if values.present == [0, _IGNORED]:
            raise request.problem(
                "the masks have the values 0 and 255, and 255 is for pixels that do not count. Save the classes as 0 "
                "and 1."
            )
        for gaps in warning_of_gaps(request, len(classes), largest):
            raise request.problem(f"the masks have the values {shown([str(value) for value in classes])}: {gaps}.")
        if request.num_classes:
            raise ConfigError(
                f"num-classes={request.num_classes}, and the masks of dataset={request.name!r} have class {largest}: "
                f"{largest + 1} or more needed. 255 is for pixels that do not count."
            )
    outputs = request.num_classes or max(largest + 1, 2)
    return Targets(targets, task, outputs, warnings=(lossy,) if lossy else ())

"""Image files as examples: decoded when they are needed, by worker processes, and kept while there is room.

``hold`` decides: what fits into ``Shape.max_bytes`` is decoded once, into memory; a larger set stays on the disk as
``FileSamples``. Both give the same bits, for any number of worker processes and any size of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fedbn_flwr.lab.data.image_files.cache import ImageCache
from fedbn_flwr.lab.data.image_files.decoding import DEEP, MODES, Bytes, Window, as_bytes
from fedbn_flwr.lab.data.image_files.file_samples import FileSamples
from fedbn_flwr.lab.data.image_files.file_set import FileSet
from fedbn_flwr.lab.data.image_files.inspection import look_at_files, refuse_damaged
from fedbn_flwr.lab.data.samples import Examples, Samples
from fedbn_flwr.lab.data.shapes import Shape

__all__ = ["DEEP", "MODES", "FileSamples", "FileSet", "ImageCache", "Window", "as_bytes", "hold", "look_at_files"]


def hold(
    paths: Sequence[Path],
    labels: Sequence[int],
    parts: Sequence[int],
    shape: Shape,
    *,
    centre: bool = False,
    masks: Sequence[Path] = (),
    mask_table: Bytes | None = None,
    window: Window | None = None,
    checked: bool = False,
) -> list[Examples]:
    """Return the images of each part, in the requested shape and in the order of ``paths``.

    Args:
        paths: image files. Every colour mode becomes RGB first; grey is computed from RGB.
        labels: class of each image; with ``masks`` its group.
        parts: lengths of the parts, which together are all files: for example training and test files.
        shape: shape of the images, and how many bytes of them are held in memory.
        centre: cut out the central square before resizing; else the whole image is resized to the shape.
        masks: files with the class of each pixel, one for each image.
        mask_table: 256 bytes, the class of each value in the masks.
        window: the values that become 0 and 255 in files with more than 8 bits for a channel; None = 0 and 65,535.
        checked: the files have been looked at already, see ``look_at_files``.

    Raises:
        DataError: files are damaged; the message names them. Of a set that stays on the disk headers and ends are
            looked at, see ``look_at_files``.
    """
    files = FileSet(paths, shape, centre=centre, masks=masks, mask_table=mask_table, window=window)
    numbers = torch.split(torch.arange(len(files)), list(parts))
    classes = torch.tensor(labels, dtype=torch.int64)
    if len(files) * files.image_bytes <= shape.max_bytes and not shape.originals:
        inputs, targets = files.read_all()
        if targets is None:
            return [Samples(inputs[part], classes[part]) for part in numbers]
        return [Samples(inputs[part], targets[part], classes[part]) for part in numbers]
    if not checked:
        refuse_damaged(look_at_files(paths, window=window).problems)
    if masks:
        return [FileSamples(files, part, None, classes[part]) for part in numbers]
    return [FileSamples(files, part, classes[part]) for part in numbers]

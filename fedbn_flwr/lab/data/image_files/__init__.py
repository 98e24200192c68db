"""Image files as examples, in memory or on the disk.

``open_images`` decodes a set that fits into ``MAX_BYTES`` once, into memory. A larger
set stays on the disk, and each batch decodes its own images. Both ways give the same
bits.

- ``decoding``: the pixels of one file, and many files in several threads.
- ``image_inputs``: files as the inputs of samples.
- ``damage``: faults of files, found before a run begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedbn_flwr.lab.data.image_files.damage import refuse_damaged_files
from fedbn_flwr.lab.data.image_files.decoding import Bytes
from fedbn_flwr.lab.data.image_files.image_inputs import ImageFiles
from fedbn_flwr.lab.data.samples import Samples, Shape

__all__ = ["MAX_BYTES", "ImageFiles", "hold"]

MAX_BYTES = 4 * 2**30
"""Image files with more decoded bytes stay on the disk."""


def open_images(
    paths: Sequence[Path],
    labels: Sequence[int],
    parts: Sequence[int],
    shape: Shape,
    *,
    centre: bool = False,
    masks: Sequence[Path] = (),
    mask_table: Bytes | None = None,
) -> list[Samples]:
    """Return the images of each part, in this shape and in the order of ``paths``.

    Args:
        paths: image files. Every colour mode becomes RGB first; grey is computed from
            RGB.
        labels: the class of each image, or the group of each image if there are
            ``masks``.
        parts: number of files in each part, for example in training and in test. The
            first part has the first files. The numbers add up to all files.
        shape: shape of the images.
        centre: cut out the central square before resizing; otherwise the whole image
            is resized to the shape.
        masks: files with the class of each pixel, one for each image.
        mask_table: 256 bytes, the class of each value in the masks.

    Raises:
        DataError: files are damaged; the message names them. If the set stays on the
            disk, only headers and ends are checked.
    """
    options: dict[str, Any] = {"centre": centre, "mask_table": mask_table}
    numbers = torch.split(torch.arange(len(paths)), list(parts))
    classes = torch.tensor(labels, dtype=torch.int64)
    # A mask takes the memory of one more channel.
    channels = shape.channels + bool(masks)
    size = len(paths) * channels * shape.height * shape.width
    if size <= MAX_BYTES and not shape.originals:
        inputs, of_pixels = ImageFiles(paths, shape, masks=masks, **options).read_all()
        if of_pixels is None:
            return [Samples(inputs[part], classes[part]) for part in numbers]
        return [
            Samples(inputs[part], of_pixels[part], classes[part]) for part in numbers
        ]
    # Large images stay on the disk. Find damaged files now, not in the middle of a run.
    refuse_damaged_files(paths)
    samples = []
    for part in numbers:
        of_part = [paths[number] for number in part.tolist()]
        if masks:
            options["masks"] = [masks[number] for number in part.tolist()]
            files = ImageFiles(of_part, shape, **options)
            samples.append(Samples(files, None, classes[part]))
        else:
            files = ImageFiles(of_part, shape, **options)
            samples.append(Samples(files, classes[part]))
    return samples

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

import torch

from fedbn_flwr.lab.data.image_files.damage import refuse_damaged_files
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
) -> list[Samples]:
    """Return the images of each part, in this shape and in the order of ``paths``.

    Args:
        paths: image files. Every colour mode becomes RGB first; grey is computed from
            RGB.
        labels: the class of each image.
        parts: number of files in each part, for example in training and in test. The
            first part has the first files. The numbers add up to all files.
        shape: shape of the images.
        centre: cut out the central square before resizing; otherwise the whole image
            is resized to the shape.

    Raises:
        DataError: files are damaged; the message names them. If the set stays on the
            disk, only headers and ends are checked.
    """
    numbers = torch.split(torch.arange(len(paths)), list(parts))
    classes = torch.tensor(labels, dtype=torch.int64)
    size = len(paths) * shape.channels * shape.height * shape.width
    if size <= MAX_BYTES and not shape.originals:
        inputs = ImageFiles(paths, shape, centre=centre).read_all()
        return [Samples(inputs[part], classes[part]) for part in numbers]
    # Large images stay on the disk. Find damaged files now, not in the middle of a run.
    refuse_damaged_files(paths)
    samples = []
    for part in numbers:
        of_part = [paths[number] for number in part.tolist()]
        files = ImageFiles(of_part, shape, centre=centre)
        samples.append(Samples(files, classes[part]))
    return samples

"""Cityscapes: street scenes with a class for each pixel and a group for each city.

Cordts et al. 2016. Height to width is 1:2 as published. Images that do not fit into
memory stay on the disk, see ``data.image_files``. Targets are bytes; batches convert
them.
The validation cities are the test set. They are not training cities, so no client has
test images from its own city.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.folders import image_files, root_of
from fedbn_flwr.lab.data.image_files import open_images
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.samples import Shape
from fedbn_flwr.training.tasks import SEGMENTATION

IGNORE = SEGMENTATION.ignore
"""The class of pixels that neither train nor count."""

TRAIN_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
"""The published label ids of the classes 0..18: road, sidewalk, ..., bicycle."""


def read_cityscapes(folder: Path, shape: Shape) -> Loaded:
    """Return the images of ``leftImg8bit`` with the classes of pixels of ``gtFine``.

    The files are ``leftImg8bit/{train,val}/CITY/*_leftImg8bit.png`` and
    ``gtFine/{train,val}/CITY/*_gtFine_labelIds.png``.

    Raises:
        DataError: a folder is absent, or an image has no label file or a label file of
            another size.
    """
    # Number the cities of both parts together, so that each group has its own number.
    root = root_of(folder, "cityscapes")
    parts = {part: _cities(root / "leftImg8bit" / part) for part in ("train", "val")}
    names = list(parts["train"] | parts["val"])
    images, groups, masks = list[Path](), list[int](), list[Path]()
    for part, cities in parts.items():
        for city, paths in cities.items():
            images += paths
            groups += [names.index(city)] * len(paths)
            masks += [_label_file(root, part, path) for path in paths]
    lengths = [sum(map(len, cities.values())) for cities in parts.values()]
    # This table maps a label id to one of the 19 classes that count; all other ids are
    # ignored.
    table = np.full(256, IGNORE, np.uint8)
    table[list(TRAIN_IDS)] = np.arange(len(TRAIN_IDS))
    train, test = open_images(
        images, groups, lengths, shape, masks=masks, mask_table=table
    )
    return Loaded(train, test, tuple(names))


def _cities(folder: Path) -> dict[str, list[Path]]:
    """Return the image files of each city. Cities and files are sorted by name."""
    if not folder.is_dir():
        raise DataError(f"folder {folder} is absent.")
    cities = {
        path.name: image_files(path)
        for path in sorted(folder.iterdir())
        if path.is_dir()
    }
    if not cities:
        raise DataError(f"folder {folder} has no folders of cities.")
    return cities


def _label_file(root: Path, part: str, image: Path) -> Path:
    stem = image.stem.removesuffix("_leftImg8bit")
    path = root / "gtFine" / part / image.parent.name / f"{stem}_gtFine_labelIds.png"
    if not path.is_file():
        raise DataError(f"image {image} has no label file {path}.")
    return path

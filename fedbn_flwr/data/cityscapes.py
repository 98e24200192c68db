"""Cityscapes: street scenes with a class for each pixel and a group for each city (Cordts et al. 2016).

The images are in memory at half the published size or less (see ``Shape.max_bytes``), height to width 1:2 as published.
Targets are bytes; batches convert them. The validation cities are the test set. They are not training cities, so no
client has test images from its own city.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from fedbn_flwr.data.folders import decoded, image_files, refuse_too_large, root_of
from fedbn_flwr.data.readers import Loaded
from fedbn_flwr.data.samples import Samples
from fedbn_flwr.data.shapes import Shape
from fedbn_flwr.errors import DataError
from fedbn_flwr.training.tasks import SEGMENTATION

__all__ = ["IGNORE", "TRAIN_IDS", "read_cityscapes"]

IGNORE = SEGMENTATION.ignore
"""The class of pixels that neither train nor count."""

TRAIN_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
"""The published label id of the classes 0..18: road, sidewalk, building, ..., motorcycle, bicycle."""


def read_cityscapes(folder: Path, shape: Shape) -> Loaded:
    """Return ``leftImg8bit/{train,val}/CITY/*_leftImg8bit.png`` with ``gtFine/.../*_gtFine_labelIds.png``.

    Raises:
        DataError: a folder is absent, or an image has no label file or a label file of another size.
    """
    root = root_of(folder, "cityscapes")
    train, test = (_cities(root / "leftImg8bit" / part) for part in ("train", "val"))
    names = [*train, *(city for city in test if city not in train)]
    count = sum(len(files) for part in (train, test) for files in part.values())
    refuse_too_large(count, shape, shape.channels + 1)
    parts = [_samples(root, part, cities, names, shape) for part, cities in (("train", train), ("val", test))]
    return Loaded(parts[0], parts[1], tuple(names))


def _cities(folder: Path) -> dict[str, list[Path]]:
    """Return the images of each city; cities and images are sorted by name."""
    if not folder.is_dir():
        raise DataError(f"folder {folder} is absent.")
    cities = {path.name: image_files(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    if not cities:
        raise DataError(f"folder {folder} has no folders of cities.")
    return cities


def _samples(root: Path, part: str, cities: dict[str, list[Path]], names: list[str], shape: Shape) -> Samples:
    files = [(path, names.index(city)) for city, paths in cities.items() for path in paths]
    images = decoded(files, shape)  # here the class of a file is its city
    targets = torch.empty(len(files), shape.height, shape.width, dtype=torch.uint8)
    for at, (path, _) in enumerate(files):
        stem = path.stem.removesuffix("_leftImg8bit")
        targets[at] = _labels(root / "gtFine" / part / path.parent.name / f"{stem}_gtFine_labelIds.png", path, shape)
    return Samples(images.inputs, targets, images.targets)


def _labels(path: Path, image_path: Path, shape: Shape) -> torch.Tensor:
    """Return the training classes of an image's pixels, uint8 (H, W), resized to the nearest pixel."""
    from PIL import Image

    if not path.is_file():
        raise DataError(f"image {image_path} has no label file {path}.")
    with Image.open(path) as labels, Image.open(image_path) as image:
        if labels.size != image.size:
            raise DataError(f"labels {path} are of {labels.size} pixels, the image of {image.size}.")
        ids = np.array(labels, dtype=np.uint8)
    table = np.full(256, IGNORE, np.uint8)
    table[list(TRAIN_IDS)] = np.arange(len(TRAIN_IDS))
    classes = torch.from_numpy(table[ids])[None, None]
    return F.interpolate(classes, (shape.height, shape.width), mode="nearest-exact")[0, 0]

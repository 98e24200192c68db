"""Sets of image files with a folder per class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.forms.image_files import Files, open_images
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.samples import Shape

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


def root_of(folder: Path, *names: str) -> Path:
    """Return the first named subfolder that exists, else the folder itself."""
    return next((folder / name for name in names if (folder / name).is_dir()), folder)


def images_of(folder: Path) -> list[Path]:
    """Return the image files of one folder, sorted by name.

    Raises:
        DataError: the folder is absent or has no images.
    """
    if not folder.is_dir():
        raise DataError(f"folder {folder} is absent.")
    with os.scandir(folder) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if os.path.splitext(entry.name)[1].lower() in SUFFIXES
        )
    if not names:
        raise DataError(f"folder {folder} has no image files ({', '.join(SUFFIXES)}).")
    return [folder / name for name in names]


def files_of_classes(folder: Path, classes: Sequence[str]) -> Files:
    """Return the image files of ``folder/CLASS`` by class, then by name."""
    files = Files()
    for label, name in enumerate(classes):
        files += [(path, label) for path in images_of(folder / name)]
    return files


def read_tiny_imagenet(folder: Path, shape: Shape) -> Loaded:
    """Return Tiny-ImageNet, with its validation set as the test set.

    Files are ``train/WNID/images/*`` and ``val/images/*`` with
    ``val/val_annotations.txt``. The labels of the published test set are not public.
    Classes are numbered by WNID.
    """
    root = root_of(folder, "tiny-imagenet-200")
    classes = _class_folders(root / "train", 200)
    train = files_of_classes(root / "train", [f"{name}/images" for name in classes])
    # All test images are in one folder, and this file lists their classes.
    annotations = (root / "val/val_annotations.txt").read_text(encoding="utf-8")
    test = []
    for line in annotations.splitlines():
        name, wnid = line.split("\t")[:2]
        # Skip a test image whose class has no training folder: a copy of the data may
        # have only some classes.
        if wnid in classes:
            test.append((root / "val/images" / name, classes.index(wnid)))
    return open_images(train, test, shape, centre=True)


def read_imagenet(folder: Path, shape: Shape) -> Loaded:
    """Return ImageNet-1K, with its validation set as the test set.

    Files are ``train/WNID/*`` and ``val/WNID/*``. Each image is cut to its central
    square. Classes are numbered by WNID; a folder may have only some of them, but train
    and val must have the same classes.
    """
    root = root_of(folder, "imagenet")
    classes = _class_folders(root / "train", 1000)
    train, test = (files_of_classes(root / part, classes) for part in ("train", "val"))
    return open_images(train, test, shape, centre=True)


def _class_folders(folder: Path, most: int) -> list[str]:
    """Return the sorted names of the subfolders."""
    if not folder.is_dir():
        raise DataError(f"folder {folder} is absent.")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not 1 <= len(names) <= most:
        raise DataError(
            f"folder {folder} has {len(names)} class folders. Use 1 to {most}."
        )
    return names

"""Sets of image files, a folder per class: decoded once, to bytes of the size that a model needs.

All images are in memory: before they decode a file, readers refuse more bytes than ``Shape.max_bytes``. Each process
decodes the files again; ImageNet at 64 pixels takes hours on few cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.data.readers import Loaded
from fedbn_flwr.data.samples import Samples
from fedbn_flwr.data.shapes import Shape, reshaped
from fedbn_flwr.errors import DataError

__all__ = ["Files", "TooLargeError", "decoded", "files_of_classes", "image_files", "read_imagenet"]
__all__ += ["read_tiny_imagenet", "refuse_too_large", "root_of"]

_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
_CHUNK = 4096

Files = list[tuple[Path, int]]
"""Image files and the class of each."""


class TooLargeError(DataError):
    """A data set needs more memory than is allowed."""


def root_of(folder: Path, *names: str) -> Path:
    """Return the first named subfolder that exists, else the folder itself."""
    return next((folder / name for name in names if (folder / name).is_dir()), folder)


def image_files(folder: Path) -> list[Path]:
    """Return the image files of one folder, sorted by name.

    Raises:
        DataError: the folder is absent or has no images.
    """
    if not folder.is_dir():
        raise DataError(f"folder {folder} is absent.")
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    if not found:
        raise DataError(f"folder {folder} has no image files ({', '.join(_SUFFIXES)}).")
    return found


def files_of_classes(folder: Path, classes: Sequence[str]) -> Files:
    """Return the image files of ``folder/CLASS`` for each class, sorted by class, then by name."""
    return [(path, label) for label, name in enumerate(classes) for path in image_files(folder / name)]


def refuse_too_large(count: int, shape: Shape, planes: int) -> None:
    """Raise TooLargeError if ``count`` images with ``planes`` bytes per pixel need more than ``shape.max_bytes``."""
    needed = count * planes * shape.height * shape.width
    if needed > shape.max_bytes:
        fits = int((shape.max_bytes * shape.height / (count * planes * shape.width)) ** 0.5)
        raise TooLargeError(
            f"{count} images of {planes}x{shape.height}x{shape.width} bytes take {needed / 2**30:.1f} GiB of memory; "
            f"{shape.max_bytes / 2**30:.1f} GiB are allowed. Use a model of smaller images (up to {fits} pixels high), "
            "or a folder with fewer images or classes."
        )


def decoded(files: Files, shape: Shape, centre: bool = False) -> Samples:
    """Return the images in the requested shape and in the order of ``files``; several threads decode them.

    Args:
        files: image files and their classes. Every colour mode becomes RGB first; grey is computed from RGB.
        shape: shape of the result.
        centre: cut out the central square before resizing; else the whole image is resized to the shape.

    Raises:
        DataError: a file is damaged; the message names it.
    """
    inputs = torch.empty(len(files), shape.channels, shape.height, shape.width, dtype=torch.uint8)

    def decode(at: int) -> None:
        pixels = _pixels(files[at][0])
        if centre:
            side = min(pixels.shape[2:])
            top, left = ((extent - side) // 2 for extent in pixels.shape[2:])
            pixels = pixels[:, :, top : top + side, left : left + side]
        inputs[at] = reshaped(Samples(pixels, torch.zeros(1, dtype=torch.int64)), shape).inputs[0]

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(files), _CHUNK):  # a million futures at the same time would need a gigabyte
            list(pool.map(decode, range(start, min(start + _CHUNK, len(files)))))
    return Samples(inputs, torch.tensor([label for _, label in files], dtype=torch.int64))


def _pixels(path: Path) -> Tensor:
    """Return one image as RGB bytes, (1, 3, H, W)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).unsqueeze(0)
    except (OSError, ValueError, SyntaxError) as error:  # Pillow raises these for damaged files
        raise DataError(f"image {path} cannot be read: {error}") from error


def read_tiny_imagenet(folder: Path, shape: Shape) -> Loaded:
    """Return Tiny-ImageNet: ``train/WNID/images/*`` and ``val/images/*`` with ``val/val_annotations.txt``.

    The test set is the validation set (the labels of the test set are not public). Classes are numbered by WNID.
    """
    root = root_of(folder, "tiny-imagenet-200")
    classes = _class_folders(root / "train", 200)
    train = files_of_classes(root / "train", [f"{name}/images" for name in classes])
    numbers = {name: label for label, name in enumerate(classes)}
    test = []
    for line in (root / "val/val_annotations.txt").read_text(encoding="utf-8").splitlines():
        name, wnid = line.split("\t")[:2]
        if wnid in numbers:  # a folder may hold only some of the classes
            test.append((root / "val/images" / name, numbers[wnid]))
    return _both(train, test, shape)


def read_imagenet(folder: Path, shape: Shape) -> Loaded:
    """Return ImageNet-1K: ``train/WNID/*`` and ``val/WNID/*``, the central square of each image, val as the test set.

    Classes are numbered by WNID. A folder may hold only some classes, the same in train and val; these are numbered.
    """
    root = root_of(folder, "imagenet")
    classes = _class_folders(root / "train", 1000)
    train, test = (files_of_classes(root / part, classes) for part in ("train", "val"))
    return _both(train, test, shape)


def _class_folders(folder: Path, most: int) -> list[str]:
    """Return the sorted names of the subfolders."""
    if not folder.is_dir():
        raise DataError(f"folder {folder} is absent.")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not 1 <= len(names) <= most:
        raise DataError(f"folder {folder} has {len(names)} class folders; 1 to {most} needed.")
    return names


def _both(train: Files, test: Files, shape: Shape) -> Loaded:
    refuse_too_large(len(train) + len(test), shape, shape.channels)
    return Loaded(decoded(train, shape, centre=True), decoded(test, shape, centre=True))

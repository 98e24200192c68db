"""A client's local data from an npz file or folders of images.

The data never leave the client.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.datasets import DATASETS
from fedbn_flwr.lab.data.domains import read_archive, read_class_folders
from fedbn_flwr.lab.data.folders import images_of
from fedbn_flwr.lab.data.forms.image_files import Files
from fedbn_flwr.lab.data.readers import READ_ERRORS, Loaded
from fedbn_flwr.lab.data.samples import Dataset, Shape, fitted, per_channel

logger = logging.getLogger("flwr")


# Cached, because in Ray and in process each message makes a new client, and each client
# would read the files again.
@functools.lru_cache(maxsize=4)
def load_local_dataset(
    path: str,
    like: str,
    channels: int,
    size: int,
    classes: tuple[str, ...] = (),
    device: str = "cpu",
    num_classes: int = 0,
) -> Dataset:
    """Return the data at a path, in the shape that a model needs.

    Args:
        path: an npz file with ``x_train``, ``y_train``, ``x_test``, ``y_test`` (uint8
            images (N, H, W) or (N, H, W, 3) and their classes), or a folder with a
            folder of images per class; every 5th image of a class, by name, is a test
            image. The path is absolute.
        like: the data set of the run. It determines mean and std of the pixels, the
            ratio of height to width, and the number of classes.
        channels: 1 or 3.
        size: height and width in pixels.
        classes: names of the class folders in the order of their numbers. A class
            without a folder has no images here. If there are no names, the folders are
            ``0``, ``1``, ...
        device: device of the samples.
        num_classes: number of classes of the model; with 0, the number of the run's
            data set.

    Raises:
        DataError: the path is relative or absent, or has no training images or another
            format; the message names it.
    """
    info = DATASETS[like]
    num_classes = num_classes or info.num_classes
    shape = Shape(channels, size, size)
    where = Path(path)
    if not where.is_absolute():
        raise DataError(
            f"data-path={path!r} is relative, but apps run in their own folders. Write"
            " an absolute path."
        )
    # If the run's classes have no names, the folders are named by the numbers of the
    # classes.
    classes = classes or tuple(map(str, range(num_classes)))
    try:
        if where.is_file():
            loaded = read_archive(where, num_classes)
        else:
            loaded = _read_folders(where, classes, shape)
    except READ_ERRORS as error:
        raise DataError(f"data-path={path!r} could not be read: {error}") from error
    # All clients train one model, so the images get the shape of the run's model, and
    # the run's mean and std.
    found = loaded.train.shape[0]
    if found > channels:
        logger.warning(
            "data-path=%r: images have %d channels, but the run's model takes %d. Their"
            " colours are lost.",
            path,
            found,
            channels,
        )
    if not len(loaded.train):
        raise DataError(f"data-path={path!r} has no training images.")
    return Dataset(
        path,
        fitted(loaded.train, shape).to(device),
        fitted(loaded.test, shape).to(device),
        num_classes,
        per_channel(info.mean, channels),
        per_channel(info.std, channels),
    )


def _read_folders(path: Path, classes: Sequence[str], shape: Shape) -> Loaded:
    """Return training and test examples of the classes that have a folder."""
    folders = {
        entry.name
        for entry in path.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    }
    # A client may have no folder for a class. It then has no examples of this class.
    files, absent = Files(), list[str]()
    for label, name in enumerate(classes):
        if name in folders:
            files += [(image, label) for image in images_of(path / name)]
        else:
            absent.append(name)
    # Report folders that no class is named after, because such a folder is more often a
    # misspelt class than a folder to leave out.
    others = folders - {*classes}
    if not files:
        raise DataError(
            f"no folder has the name of a class ({', '.join(classes[:5])}, ...). Found:"
            f" {', '.join(sorted(others)[:5])}. Name the classes in the node config:"
            " data-classes='cat,dog'"
        )
    if others:
        logger.warning(
            "data-path=%r: folders whose name is not a class are ignored: %s. Classes"
            " without a folder: %s. Names are case-sensitive. Rename the folders, or"
            " name their classes in data-classes.",
            str(path),
            ", ".join(sorted(others)),
            ", ".join(absent) or "none of the classes",
        )
    return read_class_folders(files, shape)

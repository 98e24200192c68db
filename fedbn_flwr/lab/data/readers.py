"""Readers that return public image data sets as byte tensors.

Each function imports torchvision itself. The import takes long, and most processes read
only one data set.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from tarfile import TarError
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.samples import Samples, Shape
from fedbn_flwr.training.randomness import numpy_generator


class Loaded(NamedTuple):
    """The training set and the test set from a reader, and the group names, if any."""

    train: Samples
    test: Samples
    group_names: tuple[str, ...] = ()


Reader = Callable[[Path, Shape], Loaded]
"""Reads a data set from a folder, in the requested or the published shape."""

READ_ERRORS = (
    OSError,
    RuntimeError,
    ValueError,
    EOFError,
    HTTPException,
    TarError,
    BadZipFile,
    zlib.error,
)
"""The errors of a reader when files are absent, damaged or not downloadable."""

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The files of MNIST and of data sets in its format."""

# The embedded data set has no published split into training and test. This fixed split
# gives all runs and seeds the same test examples.
_DIGITS_SPLIT_SEED = 0
_DIGITS_TEST_SHARE = 0.2


def read_digits(folder: Path, shape: Shape) -> Loaded:
    """Return scikit-learn's 1,797 digits, 8x8 grey, with 20 % of each class as tests.

    ``sklearn.datasets.load_digits`` reads the same file.
    """
    # This reader needs no arguments, because the digits are in a package, but all
    # readers have the same signature.
    del folder, shape
    # Find the file without importing scikit-learn, because the import takes as long as
    # a whole run of a small model.
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("scikit-learn is not installed, but its files have the digits")
    path = Path(spec.origin).parent / "datasets/data/digits.csv.gz"
    with gzip.open(path, "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int64)
    # A row has 64 pixels from 0 to 16, followed by the digit.
    pixels, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].copy()
    inputs = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8))
    in_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        members = np.flatnonzero(labels == label)
        rng = numpy_generator(_DIGITS_SPLIT_SEED, "digits-split", label)
        count = round(_DIGITS_TEST_SHARE * len(members))
        in_test[rng.permutation(members)[:count]] = True
    targets, test = torch.from_numpy(labels), torch.from_numpy(in_test)
    train = Samples(inputs[~test], targets[~test])
    return Loaded(train, Samples(inputs[test], targets[test]))


def read_idx(class_name: str) -> Reader:
    """Return the reader of ``FOLDER/CLASS_NAME/raw``, for data sets in MNIST's format.

    If the unpacked files are absent, the .gz files are read directly. The reader writes
    nothing, so read-only folders work. It uses torchvision's class only to download
    missing files.
    """

    def read(folder: Path, shape: Shape) -> Loaded:
        del shape
        raw = folder / class_name / "raw"
        if not all(is_there(raw / stem) for stem in IDX_FILES):
            from torchvision import datasets

            getattr(datasets, class_name)(str(folder), train=True, download=True)
        images, labels, test_images, test_labels = (
            _idx_array(raw / stem) for stem in IDX_FILES
        )
        test = as_samples(test_images, test_labels)
        return Loaded(as_samples(images, labels), test)

    return read


def is_there(path: Path) -> bool:
    """Return whether a file exists, unpacked or with the suffix .gz."""
    return path.exists() or path.with_name(path.name + ".gz").exists()


def read_torchvision(class_name: str) -> Reader:
    """Return the reader of torchvision's CIFAR10, CIFAR100, USPS or SVHN."""

    def read(folder: Path, shape: Shape) -> Loaded:
        del shape
        from torchvision import datasets

        source = getattr(datasets, class_name)
        both = []
        for part in ("train", "test"):
            # torchvision's SVHN differs from its other data sets in the argument for
            # the part, the names of the attributes and the order of the axes.
            if class_name == "SVHN":
                data = _present_or_downloaded(source, str(folder), split=part)
                samples = as_samples(data.data.transpose(0, 2, 3, 1), data.labels)
            else:
                is_train = part == "train"
                data = _present_or_downloaded(source, str(folder), train=is_train)
                samples = as_samples(np.asarray(data.data), data.targets)
            both.append(samples)
        return Loaded(both[0], both[1])

    return read


def _present_or_downloaded(
    source: Callable[..., Any], folder: str, **split: Any
) -> Any:
    """Return torchvision's data set. If its files cannot be read, download them."""
    # Try without a download first, because torchvision writes into the folder if
    # download=True, but the folder may be read-only.
    try:
        return source(folder, download=False, **split)
    except (OSError, RuntimeError):
        return source(folder, download=True, **split)


def _idx_array(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the uint8 array of an idx file, or of ``path``.gz if ``path`` is absent.

    Format: two zero bytes, 8 for uint8, the number of dimensions, each dimension as a
    big-endian int32, the data.
    """
    if path.exists():
        content = path.read_bytes()
    else:
        path = path.with_name(path.name + ".gz")
        content = gzip.decompress(path.read_bytes())
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(
            f"{path} is not an idx file of bytes: it starts with"
            f" {content[:4].hex() or 'nothing'}."
        )
    start = 4 + 4 * content[3]
    shape = tuple(
        int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)
    )
    # Refuse a file that is too short (a download that was cut off) or too long (a file
    # that was written over a longer one).
    values = np.frombuffer(content[start:], dtype=np.uint8)
    if len(content) < start or values.size != math.prod(shape):
        raise DataError(
            f"{path} is cut short or too long: {values.size} bytes for the shape"
            f" {shape} in its header."
        )
    return values.reshape(shape)


def as_samples(images: np.ndarray[Any, Any], labels: Any) -> Samples:
    """Return samples of (N, H, W) grey or (N, H, W, 3) RGB images and their labels.

    Raises:
        DataError: the images have another shape.
    """
    if images.ndim == 3:
        rows = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3):
        rows = images.transpose(0, 3, 1, 2)
    else:
        raise DataError(
            f"images have shape {images.shape}. Use (N, H, W) or (N, H, W, 3)."
        )
    # Copy the arrays, because readers return views of files or read-only arrays.
    inputs = torch.from_numpy(np.array(rows, dtype=np.uint8, order="C"))
    return Samples(inputs, torch.from_numpy(np.array(labels, dtype=np.int64)))

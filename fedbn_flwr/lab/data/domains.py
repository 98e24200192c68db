"""Data sets of several domains, with the same classes in different kinds of images.

The groups of such a data set are its domains.
Each domain is an npz file (x_train, y_train, x_test, y_test; uint8 (N, H, W) or (N, H,
W, 3)) or a folder with a folder of images per class. In a folder, every 5th file of a
class, by name, is a test image (ours: no split is published).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.folders import files_of_classes, root_of
from fedbn_flwr.lab.data.forms.image_files import Files, open_images
from fedbn_flwr.lab.data.readers import (
    IDX_FILES,
    Loaded,
    Reader,
    as_samples,
    is_there,
    read_idx,
    read_torchvision,
)
from fedbn_flwr.lab.data.samples import Samples, Shape, reshaped
from fedbn_flwr.training.randomness import numpy_generator

OFFICE_CALTECH10 = (
    ("amazon", "caltech", "dslr", "webcam"),
    (
        "backpack",
        "bike",
        "calculator",
        "headphones",
        "keyboard",
        "laptop_computer",
        "monitor",
        "mouse",
        "mug",
        "projector",
    ),
)
"""Domains and classes of Office-Caltech-10."""

DOMAINNET10 = (
    ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    (
        "bird",
        "feather",
        "headphones",
        "ice_cream",
        "teapot",
        "tiger",
        "whale",
        "windmill",
        "wine_glass",
        "zebra",
    ),
)
"""Domains and classes of the part of DomainNet that FedBN's authors use."""

DIGITS_FIVE = ("mnist", "svhn", "usps", "synth-digits", "mnist-m")
"""Domains of Digits-Five, in the order of FedBN's authors."""

# The published numbers of training and test images.
_USPS_PARTS = (7291, 2007)
_USPS_TEST = 1860
_SEED = 0


def read_domains(
    names: Sequence[str], domains: Sequence[str], classes: Sequence[str]
) -> Reader:
    """Return the reader of ``ROOT/DOMAIN.npz`` or ``ROOT/DOMAIN/CLASS/*``.

    ROOT is the first subfolder of the data folder with a name of ``names``, or else the
    data folder. Either all domains are archives, or all are folders. All domains and
    classes must exist. Other folders are ignored.
    """

    def read(folder: Path, shape: Shape) -> Loaded:
        root = root_of(folder, *names)
        # The first domain determines the form of all. If another domain has another
        # form, its reader reports an absent file.
        if (root / f"{domains[0]}.npz").is_file():
            parts = {}
            for name in domains:
                parts[name] = read_archive(root / f"{name}.npz", len(classes))
            return merged(parts, shape)
        files = {name: files_of_classes(root / name, classes) for name in domains}
        return _of_files(files, shape)

    return read


def read_digits_five(folder: Path, shape: Shape) -> Loaded:
    """Return the domains of ``DIGITS_FIVE`` whose files exist.

    A domain exists in its published files, or as the only npz file in ``FOLDER/NAME/``.
    NAME has ``_`` instead of ``-``. Nothing is downloaded. Images of all domains get the
    requested shape, so that one tensor contains them all. If the two parts of USPS have
    the published sizes, they are pooled and split again, see ``_split_usps``.

    Raises:
        DataError: no domain is present, a domain has several npz files, or a domain is
            damaged.
    """
    parts: dict[str, Loaded] = {}
    for domain in DIGITS_FIVE:
        archives = sorted((folder / domain.replace("-", "_")).glob("*.npz"))
        if len(archives) > 1:
            raise DataError(
                f"domain {domain!r} has {len(archives)} npz files in"
                f" {archives[0].parent}. Keep one."
            )
        published, names = _PUBLISHED[domain]
        if archives:
            parts[domain] = read_archive(archives[0], 10)
        # Check that the files are there, because a domain without files is left out,
        # but the reader would download them.
        elif published and all(is_there(folder / name) for name in names):
            parts[domain] = published(folder, shape)
    if "usps" in parts:
        parts["usps"] = _split_usps(parts["usps"])
    if not parts:
        raise DataError(f"none of the domains {', '.join(DIGITS_FIVE)} is present")
    return merged(parts, shape)


def _split_usps(usps: Loaded) -> Loaded:
    """Return USPS with 7,438 training and 1,860 test images (80 and 20 %).

    FedBN's authors use these sizes, and cut their other domains to 7,438 images. Ours:
    a fixed seed draws the test images, so they are the same in every run. Parts of
    other sizes are returned unchanged, since somebody else has split them.
    """
    if (len(usps.train), len(usps.test)) != _USPS_PARTS:
        return usps
    pooled = _joined([usps.train, usps.test])
    rng = numpy_generator(_SEED, "digits-five", "usps")
    order = torch.from_numpy(rng.permutation(len(pooled)))
    test, train = order[:_USPS_TEST].sort().values, order[_USPS_TEST:].sort().values
    return Loaded(Samples(*pooled.take(train)), Samples(*pooled.take(test)))


def merged(parts: Mapping[str, Loaded], shape: Shape) -> Loaded:
    """Return the images of all domains as one data set in this shape."""
    return Loaded(
        _joined([reshaped(domain.train, shape) for domain in parts.values()]),
        _joined([reshaped(domain.test, shape) for domain in parts.values()]),
        tuple(parts),
    )


def _joined(parts: Sequence[Samples]) -> Samples:
    """Return the samples of all parts in one set. Each part is a group."""
    inputs = torch.cat([part.inputs for part in parts])
    targets = torch.cat([part.targets for part in parts])
    return Samples(inputs, targets, _numbers(parts))


def _numbers(parts: Sequence[Sized]) -> Tensor:
    """Return the number of the part of each example."""
    sizes = torch.tensor([len(part) for part in parts])
    return torch.repeat_interleave(torch.arange(len(parts)), sizes)


def _of_files(files: Mapping[str, Files], shape: Shape) -> Loaded:
    """Return the data set of domains that are folders of files, a group for each."""
    parts = [_train_and_test(of_domain) for of_domain in files.values()]
    train, test = [part[0] for part in parts], [part[1] for part in parts]
    # Open the images of all domains in one call, because their total size determines
    # whether they fit into memory.
    loaded = open_images([*chain(*train)], [*chain(*test)], shape)
    return Loaded(
        loaded.train.regrouped(_numbers(train)),
        loaded.test.regrouped(_numbers(test)),
        tuple(files),
    )


def _train_and_test(files: Files) -> tuple[Files, Files]:
    train, test, seen = Files(), Files(), Counter[int]()
    for path, label in files:
        seen[label] += 1
        part = train if seen[label] % 5 else test
        part.append((path, label))
    return train, test


def read_archive(path: Path, num_classes: int) -> Loaded:
    """Return the images of an npz file."""
    with np.load(path) as archive:
        absent = {"x_train", "y_train", "x_test", "y_test"} - set(archive.files)
        if absent:
            raise DataError(f"{path} lacks {', '.join(sorted(absent))}.")
        train, test = (
            _checked(path, archive[f"x_{part}"], archive[f"y_{part}"], num_classes)
            for part in ("train", "test")
        )
    return Loaded(train, test)


def _checked(
    path: Path,
    images: np.ndarray[Any, Any],
    labels: np.ndarray[Any, Any],
    num_classes: int,
) -> Samples:
    # Refuse other types, because the conversion to bytes and classes would silently
    # change the numbers.
    are_bytes = images.dtype == np.uint8
    are_classes = labels.dtype.kind in "iu" and labels.shape == images.shape[:1]
    if not are_bytes or not are_classes:
        raise DataError(
            f"{path}: {images.dtype} images {images.shape} with {labels.dtype} labels"
            f" {labels.shape}. Use uint8 images and one integer for each image, the"
            " number of its class: y.astype('int64')."
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < num_classes:
        raise DataError(
            f"{path}: labels run from {labels.min()} to {labels.max()}. Use labels from"
            f" 0 to {num_classes - 1}."
        )
    return as_samples(images, labels)


def _read_synth_digits(folder: Path, shape: Shape) -> Loaded:
    """Return Ganin's synthetic digits, 32x32 RGB, in SVHN's file format."""
    del shape
    # Import here, because SciPy takes long to import, and few processes read this data
    # set.
    from scipy.io import loadmat

    parts = []
    for part in ("train", "test"):
        content = loadmat(folder / f"synth_{part}_32x32.mat")
        # In SVHN's format, the last axis counts the images, and the digit 0 may be
        # stored as 10.
        images = content["X"].transpose(3, 0, 1, 2)
        parts.append(as_samples(images, content["y"].reshape(-1) % 10))
    return Loaded(parts[0], parts[1])


# for each domain, the reader of its published files and the names of these files; None
# for MNIST-M, because its published files have another form
_PUBLISHED: dict[str, tuple[Reader | None, Sequence[str]]] = {
    "mnist": (read_idx("MNIST"), [f"MNIST/raw/{name}" for name in IDX_FILES]),
    "svhn": (read_torchvision("SVHN"), ["train_32x32.mat", "test_32x32.mat"]),
    "usps": (read_torchvision("USPS"), ["usps.bz2", "usps.t.bz2"]),
    "synth-digits": (
        _read_synth_digits,
        ["synth_train_32x32.mat", "synth_test_32x32.mat"],
    ),
    "mnist-m": (None, ()),
}

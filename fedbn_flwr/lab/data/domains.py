"""Data sets of several domains: the same classes in different kinds of images. The
domains are the groups.

Each domain is an npz file (x_train, y_train, x_test, y_test; uint8 (N, H, W) or (N, H,
W, 3)) or a folder with a folder of images per class. In a folder, every 5th file of a
class, by name, is a test image (ours: no split is published).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.folders import Files, files_of_classes, hold_files, root_of
from fedbn_flwr.lab.data.readers import (
    IDX_FILES,
    Loaded,
    Reader,
    as_samples,
    is_there,
    read_idx,
    read_torchvision,
)
from fedbn_flwr.lab.data.samples import Samples
from fedbn_flwr.lab.data.shapes import Shape, reshaped
from fedbn_flwr.seeds import numpy_generator

__all__ = [
    "DIGITS_FIVE",
    "DOMAINNET10",
    "OFFICE_CALTECH10",
    "merged",
    "read_archive",
    "read_class_folders",
    "read_digits_five",
    "read_domains",
]

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
"""Domains and classes of the part of DomainNet with ten classes that FedBN's authors
use.
"""

DIGITS_FIVE = ("mnist", "svhn", "usps", "synth-digits", "mnist-m")
"""Domains of Digits-Five, in the order of FedBN's authors."""

_USPS_PARTS, _USPS_TEST, _SEED = (7291, 2007), 1860, 0


def read_domains(
    names: Sequence[str], domains: Sequence[str], classes: Sequence[str]
) -> Reader:
    """Return the reader of ``ROOT/DOMAIN.npz`` or ``ROOT/DOMAIN/CLASS/*``; ROOT is a
    named subfolder or the folder.

    All domains are archives, or all are folders. All domains and classes must be there;
    folders of other classes are ignored.
    """

    def read(folder: Path, shape: Shape) -> Loaded:
        root = root_of(folder, *names)
        if (root / f"{domains[0]}.npz").is_file():
            return merged(
                {
                    name: read_archive(root / f"{name}.npz", len(classes))
                    for name in domains
                },
                shape,
            )
        return _of_files(
            {name: files_of_classes(root / name, classes) for name in domains}, shape
        )

    return read


def read_digits_five(folder: Path, shape: Shape) -> Loaded:
    """Return the domains of ``DIGITS_FIVE`` that are there: as published, or as the
    only npz file in ``FOLDER/NAME/``.

    Nothing is downloaded. Images of all domains get the requested shape, so that one
    tensor holds them all. The two published parts of USPS are pooled and split anew,
    see ``_split_anew``.

    Raises:
        DataError: no domain is present, or one is damaged.
    """
    parts: dict[str, tuple[Samples, Samples]] = {}
    for domain in DIGITS_FIVE:
        archives = sorted((folder / domain.replace("-", "_")).glob("*.npz"))
        if len(archives) > 1:
            raise DataError(
                f"domain {domain!r} has {len(archives)} npz files in"
                f" {archives[0].parent}; one needed."
            )
        published, names = _PUBLISHED[domain]
        if archives:
            parts[domain] = read_archive(archives[0], 10)
        # so that nothing is downloaded
        elif published and all(is_there(folder / name) for name in names):
            parts[domain] = published(folder, shape)[:2]
    if "usps" in parts:
        parts["usps"] = _split_anew(parts["usps"])
    if not parts:
        raise DataError(f"none of the domains {', '.join(DIGITS_FIVE)} is present")
    return merged(parts, shape)


def _split_anew(usps: tuple[Samples, Samples]) -> tuple[Samples, Samples]:
    """Return USPS with 7,438 training and 1,860 test images: 80 and 20 % of its two
    published parts together.

    So FedBN's authors have it, whose other domains are cut to 7,438 images. Which
    images are for testing is ours: drawn with a fixed seed, the same in every run.
    Parts of other sizes are returned as they are: somebody's own split.
    """
    train, test = usps
    if (len(train), len(test)) != _USPS_PARTS:
        return usps
    inputs, targets = (
        torch.cat([train.inputs, test.inputs]),
        torch.cat([train.targets, test.targets]),
    )
    order = torch.from_numpy(
        numpy_generator(_SEED, "digits-five", "usps").permutation(len(targets))
    )
    chosen = (order[_USPS_TEST:].sort().values, order[:_USPS_TEST].sort().values)
    new_train, new_test = (
        Samples(inputs[indices], targets[indices]) for indices in chosen
    )
    return new_train, new_test


def merged(parts: Mapping[str, tuple[Samples, Samples]], shape: Shape) -> Loaded:
    """Return the (train, test) of all domains as one data set in the requested shape;
    each domain is a group.
    """
    train, test = (
        _joined(samples, shape) for samples in zip(*parts.values(), strict=True)
    )
    return Loaded(train, test, tuple(parts))


def _joined(parts: Sequence[Samples], shape: Shape) -> Samples:
    """Return the samples of all domains as one; each domain is a group."""
    pieces = [reshaped(samples, shape) for samples in parts]
    sizes = torch.tensor([len(piece) for piece in pieces])
    return Samples(
        torch.cat([piece.inputs for piece in pieces]),
        torch.cat([piece.targets for piece in pieces]),
        torch.repeat_interleave(torch.arange(len(pieces)), sizes),
    )


def _of_files(files: Mapping[str, Files], shape: Shape) -> Loaded:
    """Return domains that are all folders of files; each domain is a group."""
    parts: tuple[Files, Files] = ([], [])  # training and test files of all domains
    groups: tuple[list[int], list[int]] = ([], [])
    for number, of_domain in enumerate(files.values()):
        for which, part in enumerate(_train_and_test(of_domain)):
            parts[which].extend(part)
            groups[which].extend([number] * len(part))
    train, test = hold_files(parts, shape)
    return Loaded(
        train.regrouped(torch.tensor(groups[0])),
        test.regrouped(torch.tensor(groups[1])),
        tuple(files),
    )


def read_class_folders(files: Files, shape: Shape) -> tuple[Samples, Samples]:
    """Return the (train, test) files; every 5th file of a class (the 5th, the 10th,
    ...) is a test file.
    """
    train, test = hold_files(_train_and_test(files), shape)
    return train, test


def _train_and_test(files: Files) -> tuple[Files, Files]:
    train, test, seen = Files(), Files(), Counter[int]()
    for path, label in files:
        seen[label] += 1
        (train if seen[label] % 5 else test).append((path, label))
    return train, test


def read_archive(path: Path, num_classes: int) -> tuple[Samples, Samples]:
    """Return (train, test) of an npz file."""
    with np.load(path) as archive:
        absent = {"x_train", "y_train", "x_test", "y_test"} - set(archive.files)
        if absent:
            raise DataError(f"{path} lacks {', '.join(sorted(absent))}.")
        train, test = (
            _checked(path, archive[f"x_{p}"], archive[f"y_{p}"], num_classes)
            for p in ("train", "test")
        )
    return train, test


def _checked(
    path: Path,
    images: np.ndarray[Any, Any],
    labels: np.ndarray[Any, Any],
    num_classes: int,
) -> Samples:
    # Other numbers would become bytes and classes without a word.
    if (
        images.dtype != np.uint8
        or labels.dtype.kind not in "iu"
        or labels.shape != images.shape[:1]
    ):
        raise DataError(
            f"{path}: {images.dtype} images {images.shape} with {labels.dtype} labels"
            f" {labels.shape}; uint8 images with an integer each needed, the class"
            " number: y.astype('int64')."
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < num_classes:
        raise DataError(
            f"{path}: labels run from {labels.min()} to {labels.max()}; 0 to"
            f" {num_classes - 1} allowed."
        )
    return as_samples(images, labels)


def _read_synth_digits(folder: Path, shape: Shape) -> Loaded:
    """Return Ganin's synthetic digits, 32x32 RGB, in SVHN's file format."""
    del shape
    from scipy.io import loadmat

    parts = (loadmat(folder / f"synth_{part}_32x32.mat") for part in ("train", "test"))
    train, test = (
        as_samples(part["X"].transpose(3, 0, 1, 2), part["y"].reshape(-1) % 10)
        for part in parts
    )
    return Loaded(train, test)


# The reader of each domain's published files, and these files; MNIST-M is published in
# another form.
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

"""Data sets of several domains: the same classes in different kinds of images. The domains are the groups.

Each domain is an npz file (x_train, y_train, x_test, y_test; uint8 (N, H, W) or (N, H, W, 3)) or a folder with a folder
of images per class. In a folder, every 5th file of a class, by name, is a test image (ours: no split is published).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.folders import Files, files_of_classes, hold_files, root_of
from fedbn_flwr.lab.data.readers import Loaded, Reader, as_samples, read_idx, read_svhn, read_usps
from fedbn_flwr.lab.data.samples import Examples, Samples
from fedbn_flwr.lab.data.shapes import Shape, reshaped

__all__ = ["DIGITS_FIVE", "DOMAINNET10", "OFFICE_CALTECH10", "merged", "read_archive", "read_class_folders"]
__all__ += ["read_digits_five", "read_domains"]

OFFICE_CALTECH10 = (
    ("amazon", "caltech", "dslr", "webcam"),
    (
        *("backpack", "bike", "calculator", "headphones", "keyboard"),
        *("laptop_computer", "monitor", "mouse", "mug", "projector"),
    ),
)
"""Domains and classes of Office-Caltech-10."""

DOMAINNET10 = (
    ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra"),
)
"""Domains and classes of the part of DomainNet with ten classes that FedBN's authors use."""

DIGITS_FIVE = ("mnist", "svhn", "usps", "synth-digits", "mnist-m")
"""Domains of Digits-Five, in the order of FedBN's authors."""


def read_domains(names: Sequence[str], domains: Sequence[str], classes: Sequence[str]) -> Reader:
    """Return the reader of ``ROOT/DOMAIN.npz`` or ``ROOT/DOMAIN/CLASS/*``; ROOT is a named subfolder or the folder.

    All domains and classes must be there; folders of other classes are ignored.
    """

    def read(folder: Path, shape: Shape) -> Loaded:
        root = root_of(folder, *names)
        archives = {domain: root / f"{domain}.npz" for domain in domains}
        files = {d: files_of_classes(root / d, classes) for d, path in archives.items() if not path.is_file()}
        if len(files) == len(domains):
            return _of_files(files, shape)
        parts: dict[str, tuple[Examples, Examples]] = {
            d: read_class_folders(files[d], shape) if d in files else read_archive(archives[d], len(classes))
            for d in domains
        }
        return merged(parts, shape)

    return read


def read_digits_five(folder: Path, shape: Shape) -> Loaded:
    """Return the domains of ``DIGITS_FIVE`` that are there: as published, or as the only npz file in ``FOLDER/NAME/``.

    Nothing is downloaded. Images of all domains get the requested shape, so that one tensor holds them all.

    Raises:
        DataError: no domain is present, or one is damaged.
    """
    parts: dict[str, tuple[Examples, Examples]] = {}
    for domain in DIGITS_FIVE:
        archives = sorted((folder / domain.replace("-", "_")).glob("*.npz"))
        if len(archives) > 1:
            raise DataError(f"domain {domain!r} has {len(archives)} npz files in {archives[0].parent}; one needed.")
        published = _published_reader(domain, folder)
        if archives:
            parts[domain] = read_archive(archives[0], 10)
        elif published is not None:
            parts[domain] = published(folder, shape)[:2]
    if not parts:
        raise DataError(f"none of the domains {', '.join(DIGITS_FIVE)} is present")
    return merged(parts, shape)


def merged(parts: Mapping[str, tuple[Examples, Examples]], shape: Shape) -> Loaded:
    """Return the (train, test) of all domains as one data set in the requested shape; each domain is a group.

    Raises:
        DataError: some domains stay on the disk and others are in memory.
    """
    both = []
    for which in (0, 1):
        chosen = [part[which] for part in parts.values()]
        pieces = [reshaped(samples, shape) for samples in chosen if isinstance(samples, Samples)]
        if len(pieces) < len(parts):
            raise DataError(
                "some domains are npz files and others are folders of images that do not fit into cache-gib. Use "
                "folders for all, or a larger cache-gib, and augment without resized-crop."
            )
        sizes = torch.tensor([len(piece) for piece in pieces])
        both.append(
            Samples(
                torch.cat([piece.inputs for piece in pieces]),
                torch.cat([piece.targets for piece in pieces]),
                torch.repeat_interleave(torch.arange(len(pieces)), sizes),
            )
        )
    return Loaded(both[0], both[1], tuple(parts))


def _of_files(files: Mapping[str, Files], shape: Shape) -> Loaded:
    """Return domains that are all folders of files; each domain is a group."""
    split = [_train_and_test(own) for own in files.values()]
    whole = [[file for part in split for file in part[which]] for which in (0, 1)]
    sizes = [torch.tensor([len(part[which]) for part in split]) for which in (0, 1)]
    groups = [torch.repeat_interleave(torch.arange(len(split)), size) for size in sizes]
    train, test = (samples.regrouped(own) for samples, own in zip(hold_files(whole, shape), groups, strict=True))
    return Loaded(train, test, tuple(files))


def read_class_folders(files: Files, shape: Shape) -> tuple[Examples, Examples]:
    """Return the (train, test) files; every 5th file of a class (the 5th, the 10th, ...) is a test file."""
    train, test = hold_files(_train_and_test(files), shape)
    return train, test


def _train_and_test(files: Files) -> tuple[Files, Files]:
    train: Files = []
    test: Files = []
    seen = dict.fromkeys((label for _, label in files), 0)
    for path, label in files:
        seen[label] += 1
        chosen = test if seen[label] % 5 == 0 else train
        chosen.append((path, label))
    return train, test


def read_archive(path: Path, num_classes: int) -> tuple[Samples, Samples]:
    """Return (train, test) of an npz file."""
    with np.load(path) as archive:
        absent = {"x_train", "y_train", "x_test", "y_test"} - set(archive.files)
        if absent:
            raise DataError(f"{path} lacks {', '.join(sorted(absent))}.")
        train, test = (_checked(path, archive[f"x_{p}"], archive[f"y_{p}"], num_classes) for p in ("train", "test"))
    return train, test


def _checked(path: Path, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], num_classes: int) -> Samples:
    if images.dtype != np.uint8 or labels.shape != images.shape[:1]:
        raise DataError(f"{path}: {images.dtype} images {images.shape} with labels {labels.shape}; one uint8 each.")
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: labels are {labels.dtype} ({labels[:2].tolist()}, ...); integers 0 to {num_classes - 1} needed: "
            "the class numbers, y.astype('int64')."
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < num_classes:
        raise DataError(f"{path}: labels run from {labels.min()} to {labels.max()}; 0 to {num_classes - 1} allowed.")
    return as_samples(images, labels)


def _published_reader(domain: str, folder: Path) -> Reader | None:
    """Return the reader of a domain's published files; None unless all are there, so that nothing is downloaded."""
    idx = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    known: dict[str, tuple[Reader, list[str]]] = {
        "mnist": (read_idx("MNIST"), [f"MNIST/raw/{stem}" for stem in idx]),
        "svhn": (read_svhn, ["train_32x32.mat", "test_32x32.mat"]),
        "usps": (read_usps, ["usps.bz2", "usps.t.bz2"]),
        "synth-digits": (_read_synth_digits, ["synth_train_32x32.mat", "synth_test_32x32.mat"]),
    }
    if domain not in known:
        return None
    reader, names = known[domain]
    present = all((folder / name).exists() or (folder / f"{name}.gz").exists() for name in names)
    return reader if present else None


def _read_synth_digits(folder: Path, shape: Shape) -> Loaded:
    """Return Ganin's synthetic digits, 32x32 RGB, in SVHN's file format."""
    del shape
    from scipy.io import loadmat

    parts = (loadmat(folder / f"synth_{part}_32x32.mat") for part in ("train", "test"))
    train, test = (as_samples(part["X"].transpose(3, 0, 1, 2), part["y"].reshape(-1) % 10) for part in parts)
    return Loaded(train, test)

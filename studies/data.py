"""The data sets of the papers' studies: domains, Tiny-ImageNet and ImageNet.

A study names one as ``dataset: "studies.data:NAME"``, from the folder of the checkout.
NAME is a ``DatasetInfo`` below. To add a data set of your own in this way, write such an
entry in a module of yours.

Data sets of several domains have the same classes in different kinds of images; their
groups are the domains. Each domain is an npz file (x_train, y_train, x_test, y_test;
uint8 (N, H, W) or (N, H, W, 3)) or a folder with a folder of images per class. In a
folder, every 5th file of a class, by name, is a test image (ours: no split is
published).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.datasets import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    DatasetInfo,
)
from fedbn_flwr.lab.data.digits_domains import joined, merged, numbers
from fedbn_flwr.lab.data.forms.image_files import SUFFIXES, Files, open_images
from fedbn_flwr.lab.data.readers import (
    IDX_FILES,
    Loaded,
    Reader,
    as_samples,
    is_there,
    read_idx,
    read_torchvision,
)
from fedbn_flwr.lab.data.samples import Samples, Shape
from fedbn_flwr.training.randomness import numpy_generator


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
    pooled = joined([usps.train, usps.test])
    rng = numpy_generator(_SEED, "digits-five", "usps")
    order = torch.from_numpy(rng.permutation(len(pooled)))
    test, train = order[:_USPS_TEST].sort().values, order[_USPS_TEST:].sort().values
    return Loaded(Samples(*pooled.take(train)), Samples(*pooled.take(test)))


def _of_files(files: Mapping[str, Files], shape: Shape) -> Loaded:
    """Return the data set of domains that are folders of files, a group for each."""
    parts = [_train_and_test(of_domain) for of_domain in files.values()]
    train, test = [part[0] for part in parts], [part[1] for part in parts]
    # Open the images of all domains in one call, because their total size determines
    # whether they fit into memory.
    loaded = open_images([*chain(*train)], [*chain(*test)], shape)
    return Loaded(
        loaded.train.regrouped(numbers(train)),
        loaded.test.regrouped(numbers(test)),
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


digits_five = DatasetInfo(
    "digits-five",
    num_classes=10,
    channels=3,
    size=28,
    summary=(
        "digits in up to 5 domains: those present of MNIST, SVHN, USPS,"
        " SynthDigits, MNIST-M"
    ),
    source="Peng et al. 2019; Li et al. 2021 (FedBN), whose mean and std these are",
    loader=read_digits_five,
    files=(
        "one or more of MNIST/raw/, train_32x32.mat and test_32x32.mat (SVHN),"
        " usps.bz2 and usps.t.bz2, synth_train_32x32.mat and synth_test_32x32.mat,"
        " or mnist/, svhn/, usps/, synth_digits/ and mnist_m/ with one npz file"
        " each (x_train, y_train, x_test, y_test)"
    ),
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    grouped=True,
)
office_caltech10 = DatasetInfo(
    "office-caltech10",
    num_classes=10,
    channels=3,
    size=64,
    summary="2,533 photographs of 10 kinds of things in 4 domains",
    source="Gong et al. 2012",
    loader=read_domains(("office_caltech10",), *OFFICE_CALTECH10),
    files=(
        "office_caltech10/ with amazon, caltech, dslr and webcam, all as NAME.npz"
        " or all as NAME/CLASS/*.jpg"
    ),
    mean=(0.6747, 0.6690, 0.6653),
    std=(0.3267, 0.3280, 0.3318),
    grouped=True,
)


def read_half_of_cifar10(known: bool) -> Reader:
    """Return the reader of the classes 0 to 4 (``known``), or of 5 to 9 as 0 to 4."""

    def read(folder: Path, shape: Shape) -> Loaded:
        whole = read_torchvision("CIFAR10")(folder, shape)
        halves = []
        for samples in (whole.train, whole.test):
            chosen = (samples.targets < 5) == known
            images, labels = samples.source[chosen], samples.targets[chosen] % 5
            halves.append(Samples(images, labels))
        return Loaded(*halves)

    return read


cifar10_known = DatasetInfo(
    "cifar10-known",
    num_classes=5,
    channels=3,
    size=32,
    summary="30,000 photographs of the first 5 classes of CIFAR-10, to train a network",
    source="Krizhevsky 2009",
    loader=read_half_of_cifar10(known=True),
    files="cifar-10-batches-py/",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
cifar10_new = replace(
    cifar10_known,
    name="cifar10-new",
    summary="30,000 photographs of the last 5 classes of CIFAR-10",
    loader=read_half_of_cifar10(known=False),
)
domainnet10 = DatasetInfo(
    "domainnet10",
    num_classes=10,
    channels=3,
    size=64,
    summary="10 classes of pictures in 6 domains, as FedBN's authors chose them",
    source="Peng et al. 2019; Li et al. 2021 (FedBN)",
    loader=read_domains(("domainnet10", "domainnet"), *DOMAINNET10),
    files=(
        "domainnet10/ or domainnet/ with clipart, infograph, painting, quickdraw,"
        " real and sketch, all as NAME.npz or all as NAME/CLASS/*.jpg"
    ),
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    grouped=True,
)
tiny_imagenet = DatasetInfo(
    "tiny-imagenet",
    num_classes=200,
    channels=3,
    size=64,
    summary="110,000 photographs of 200 kinds of things, 64x64 RGB",
    source="Le & Yang 2015",
    loader=read_tiny_imagenet,
    files=(
        "tiny-imagenet-200/ with train/WNID/images/*.JPEG, val/images/*.JPEG and"
        " val/val_annotations.txt"
    ),
    mean=(0.4802, 0.4481, 0.3975),
    std=(0.2770, 0.2691, 0.2821),
)
imagenet = DatasetInfo(
    "imagenet",
    num_classes=1000,
    channels=3,
    size=224,
    summary="1,331,167 photographs of 1000 kinds of things",
    source="Russakovsky et al. 2015",
    loader=read_imagenet,
    files="imagenet/ with train/WNID/*.JPEG and val/WNID/*.JPEG",
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
)

"""Own data from folders of images, with client, part and class in their paths.

The layouts are ``class/file``, ``client/class/file``, ``{train,test}/class/file`` and
``client/{train,test}/class/file``. The names of the class folders, in the order of the
alphabet, are the classes. Files of other kinds are left out. For a finished model
(``known_classes``), the classes are its classes. If a folder has another
name, in any layout, no image has a class, and the log names the folder.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import statistics
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedbn_flwr.lab.data.datasets import IMAGENET_MEAN, IMAGENET_STD, DatasetInfo
from fedbn_flwr.lab.data.forms.image_files import (
    SUFFIXES,
    for_all,
    open_images,
    refuse_damaged_files,
    size_of,
)
from fedbn_flwr.lab.data.forms.request import OwnData, chosen_task, shown
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.samples import UNKNOWN, Shape
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.data.validation import split_off
from fedbn_flwr.messages.site_names import fault_of_list
from fedbn_flwr.training.tasks import TASKS

logger = logging.getLogger("flwr")

_PARTS = {"train": False, "training": False, "test": True, "testing": True}
_VALIDATION = {"val", "valid", "validation"}
# largest number of files whose headers are read to find the sizes of the images
_MOST_HEADERS = 1000
# a fixed seed, so that all runs have the same test examples
_TEST_SEED = 0
# height in pixels of larger images, unless image-size sets another height
_LARGEST = 224


class FolderPlace(NamedTuple):
    """Client, part and class of the images in a folder.

    The client or the part is "" if the path of the folder has none.
    """

    client: str = ""
    part: str = ""
    label: str = ""


class OwnFiles:
    """Own image files, divided into training and test examples.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the folder has no images, another number of classes, two spellings
            of a class, or none of the layouts.
    """

    def __init__(self, request: OwnData) -> None:
        root = request.existing()
        folders, known = _image_folders(root), request.known_classes
        names = {folder.name for folder, images in folders.items() if images}
        labelled = not known or (bool(names) and names <= {*known})
        unknown = sorted(names - {*known})
        if known and unknown and names != {root.name}:
            logger.warning(
                "dataset=%r is used without labels, because these folders are not"
                " classes of the run: %s. Its classes: %s. Rename the folders to use"
                " their labels.",
                request.name,
                shown(unknown),
                shown(known),
            )
        places = dict.fromkeys(folders, FolderPlace())
        if labelled and not (known and folders.get(root)):
            places = {at: _place(request, at.relative_to(root)) for at in folders}
        else:
            labelled = False
        # All folders must have the same layout: all or none are in a client's folder,
        # and all or none are in a train or test folder.
        if len({(bool(at.client), bool(at.part)) for at in places.values()}) > 1:
            raise request.problem(
                "some images are below a client folder (or a train or test folder), but"
                " others are not. Give all images the same layout."
            )
        # List the files in the order of their paths, and the place of each.
        self._paths, of_files = list[Path](), list[FolderPlace]()
        for folder, images in sorted(folders.items()):
            self._paths += [folder / name for name in images]
            of_files += [places[folder]] * len(images)
        if not self._paths:
            raise request.problem(
                f"no image files ({', '.join(SUFFIXES)}) in folders below it. Put them"
                " into class/file, client/class/file or client/train/class/file."
            )
        self._request, self._sizes = request, _sizes(self._paths)
        self._classes: tuple[str, ...] = ()
        self._targets = torch.full((len(of_files),), UNKNOWN)
        self._task, self._outputs = TASKS.get(request.task), request.num_classes
        if labelled:
            classes = [*known] or sorted({at.label for at in places.values()})
            _check_spelling(request, classes, places.values())
            _check_classes(request, classes, {place.label for place in of_files})
            tasks = ("classification", "binary")[: 2 if len(classes) == 2 else 1]
            self._task, self._classes = chosen_task(request, tasks), tuple(classes)
            self._outputs = self._task.outputs(len(classes))
            numbers = [classes.index(place.label) for place in of_files]
            self._targets = torch.tensor(numbers)
        # client and part of each image; None if their paths have none
        self._names: tuple[str, ...] = ()
        self._clients: NDArray[np.int64] | None = None
        if of_files[0].client:
            clients = [place.client for place in of_files]
            sites, self._clients = np.unique(clients, return_inverse=True)
            self._names = tuple(sites.tolist())
        self._tests = _tests(request, [place.part for place in of_files])
        fault = fault_of_list(self._names)
        if fault:
            raise request.problem(f"a client has no usable name: {fault}")

    @property
    def divided(self) -> bool:
        """Whether the data themselves determine the test examples."""
        return self._tests is not None

    @functools.cached_property
    def info(self) -> DatasetInfo:
        """The description of the data."""
        # Use the median height, so that a single thumbnail among the images does not
        # determine the height.
        height = statistics.median_low([height for _, height in self._sizes])
        # Use ImageNet's mean and std, because every node must scale pixels alike, but
        # each node has other data.
        return DatasetInfo(
            self._request.name,
            num_classes=self._outputs,
            channels=3,
            size=min(height, _LARGEST),
            loader=self.load,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            grouped=self._clients is not None,
            task=self._task or TASKS[self._request.task],
            class_names=self._classes,
            client_names=self._names,
        )

    @functools.cached_property
    def _parts(self) -> tuple[Indices, Indices]:
        """The numbers of the training and of the test examples."""
        share, everything = self._request.test_share, np.arange(len(self._paths))
        # Use the data's own split into training and test, if there is one.
        if self._tests is not None:
            return everything[~self._tests], everything[self._tests]
        if share == 1:
            return everything[:0], everything
        # Otherwise draw a share of the examples of each cell. A cell is a class of a
        # client.
        cells = self._targets.numpy()
        if self._clients is not None:
            cells = cells * len(self._names) + self._clients
        return split_off(everything, cells, share, _TEST_SEED)

    def load(self, folder: Path, shape: Shape) -> Loaded:
        """Return the training and the test examples, see ``DatasetInfo.loader``."""
        # ``folder`` is the folder of registered data sets. Own data have their own path.
        del folder
        if not self._request.image_size and len(set(self._sizes)) > 1:
            by_area = sorted(self._sizes, key=math.prod)
            logger.warning(
                "dataset=%r: its images have several sizes, from %dx%d to %dx%d (width"
                " x height). Each becomes %dx%d, by their median height and the limits"
                " of the model. Set image-size for another height.",
                self._request.name,
                *by_area[0],
                *by_area[-1],
                shape.width,
                shape.height,
            )
        files = [*zip(self._paths, self._targets.tolist(), strict=True)]
        train, test = ([files[at] for at in part] for part in self._parts)
        loaded = open_images(train, test, shape)
        if self._clients is None:
            return loaded
        of_train, of_test = (
            torch.from_numpy(self._clients[part]) for part in self._parts
        )
        return Loaded(
            loaded.train.regrouped(of_train),
            loaded.test.regrouped(of_test),
            self._names,
        )

    @property
    def tests(self) -> dict[str, list[int | str]]:
        """The file of each test image, and its client, if any."""
        _, tests = self._parts
        columns: dict[str, list[int | str]] = {
            "file": [self._name_of(self._paths[at]) for at in tests]
        }
        if self._clients is not None:
            columns["client"] = [self._names[at] for at in self._clients[tests]]
        return columns

    def _name_of(self, path: Path) -> str:
        return path.relative_to(self._request.path).as_posix()

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 of the data, to notice changes.

        It depends on the paths and sizes of the files, their order, their division
        into training and test examples, and the clients.
        """
        # Do not change the order of the entries, because runs save this digest in
        # data.json: unchanged data would look changed.
        lines = [f"{self._name_of(one)} {one.stat().st_size}" for one in self._paths]
        digest = hashlib.sha256("\n".join(lines).encode())
        digest.update(self._targets.numpy().tobytes())
        for rows in self._parts:
            digest.update(rows.tobytes())
        if self._clients is not None:
            digest.update(self._clients.tobytes())
        digest.update("\n".join(self._names).encode())
        return digest.hexdigest()


def _check_spelling(
    request: OwnData, classes: Sequence[str], places: Collection[FolderPlace]
) -> None:
    """Raise DataError if two names are spellings of one class.

    They are two classes if a client has a folder for each.
    """
    spelt = {one: unicodedata.normalize("NFKC", one).casefold() for one in classes}
    folded = Counter(spelt.values())
    twice = [ascii(one) for one in classes if folded[spelt[one]] > 1]
    most = max(Counter(place[:2] for place in places).values())
    if twice and most < len(classes):
        raise request.problem(
            f"some class folders, {shown(twice, 100)}, differ only in"
            " capital letters or in the encoding of a character, and no client has all"
            " of them. If they are one class, rename them to one name. If they are"
            " different classes, give one client a folder for each class; it may be"
            " empty."
        )


def _sizes(paths: Sequence[Path]) -> list[tuple[int, int]]:
    """Return width and height of each image, or of every n-th image if many.

    Images without a readable header are left out.

    Raises:
        DataError: none of the chosen images can be read.
    """
    some = paths[:: 1 + len(paths) // _MOST_HEADERS]
    sizes = [size for size in for_all(size_of, some) if size]
    # If no file can be read, report a few of the damaged files now. The others are
    # reported when all images are read.
    if not sizes:
        refuse_damaged_files(some)
    return sizes


def _image_folders(root: Path) -> dict[Path, list[str]]:
    """Return the innermost folders, each with the sorted names of its image files.

    An innermost folder without images is included if it is as deep as a folder with
    images, because it still names a class. Hidden files and folders are left out.
    """
    folders, others = {}, list[str]()
    for name, below, files in os.walk(root, followlinks=True):
        # Change the list in place, because ``os.walk`` visits only the folders that
        # remain in it.
        # Leave out links to the folders on the way here, because they would never end.
        above = {folder.resolve() for folder in (Path(name), *Path(name).parents)}
        below[:] = [
            step
            for step in below
            if not step.startswith(".") and (Path(name) / step).resolve() not in above
        ]
        images = list[str]()
        for file in files:
            if file.startswith("."):
                continue
            if Path(file).suffix.lower() in SUFFIXES:
                images.append(file)
            else:
                others.append(str((Path(name) / file).relative_to(root)))
        if images or (not below and Path(name) != root):
            folders[Path(name)] = sorted(images)
    # An archive may leave an empty folder, such as __MACOSX.
    depths = {len(folder.parts) for folder, images in folders.items() if images}
    for folder in [*folders]:
        if len(folder.parts) not in depths:
            others.append(str(folder.relative_to(root)))
            del folders[folder]
    if others:
        logger.warning(
            "folder %s: left out %d of the files and empty folders, because their names"
            " do not end in %s: %s",
            root,
            len(others),
            ", ".join(SUFFIXES),
            shown(sorted(others)),
        )
    return folders


def _place(request: OwnData, folder: Path) -> FolderPlace:
    """Return the place of a folder's images, from its path below the root."""
    *above, label = folder.parts or ("",)
    # A folder above the class folder is a part (train or test) or a client, in either
    # order.
    parts, clients = list[str](), list[str]()
    for step in above:
        if step.lower() in _PARTS:
            parts.append(step.lower())
        else:
            clients.append(step)
    in_validation = any(step.lower() in _VALIDATION for step in above)
    if not label or len(clients) > 1 or len(parts) > 1 or in_validation:
        raise request.problem(
            f"images are in {folder}. The layouts are class/file, client/class/file,"
            " and train and test between client and class. If there is a validation"
            " folder, move its images into train and set validation-share."
        )
    return FolderPlace("".join(clients), "".join(parts), label)


def _check_classes(
    request: OwnData, classes: Sequence[str], with_images: Collection[str]
) -> None:
    """Raise DataError unless the class folders can be the classes of the run."""
    # One folder with such a name may be a class, such as "train" among vehicles. Two
    # are probably parts.
    if sum(label.lower() in {*_PARTS, *_VALIDATION} for label in classes) > 1:
        raise request.problem(
            f"folders of classes are called {shown(classes)}. Put the class folders"
            " below train and test, as in train/class/file or client/train/class/file."
        )
    # Each client numbers its own class folders, so a missing folder would change the
    # number of all later classes.
    wanted = request.num_classes
    needs = f"num-classes is {wanted}"
    remedy = "The folder of a class may be empty."
    if request.task == "binary":
        wanted, needs = 2, "task=binary needs 2 classes"
        remedy = "For more classes, use task=classification."
    elif not wanted:
        wanted = max(len(with_images), 2)
        needs = "the run needs two or more classes, all with images"
        remedy = (
            "If the folder of a class is empty, also set num-classes to the number of"
            " classes."
        )
    if len(classes) != wanted:
        raise request.problem(
            f"{needs}, but the class folders are {shown(classes)}. Each client needs"
            f" one folder for each class, with the same names. {remedy}"
        )


def _tests(request: OwnData, parts: Sequence[str]) -> NDArray[np.bool_] | None:
    """Return whether each image is a test image, or None without such folders.

    Args:
        request: the request, for messages.
        parts: the part of each image, "" if no folder train or test is in its path.
    """
    if not any(parts):
        return None
    tests = np.array([_PARTS[part] for part in parts])
    if tests.all() or not tests.any():
        raise request.problem(
            f"it has no {'training' if tests.all() else 'test'} images. Add them, or"
            " remove the folders train and test; then test-share of the images are"
            " tests."
        )
    return tests

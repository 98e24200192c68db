"""Own data from folders of images, with client, part and class in their paths.

The layouts are ``class/file``, ``client/class/file``, ``{train,test}/class/file`` and
``client/{train,test}/class/file``. The names of the class folders, in the order of the
alphabet, are the classes. Files of other kinds are left out. For a finished model
(``known_classes``), the classes are its classes. Images in folders with other names,
in any layout, then have no classes.
"""

from __future__ import annotations

import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedbn_flwr.lab.data.folders import SUFFIXES
from fedbn_flwr.lab.data.forms.image_files import (
    for_all,
    refuse_damaged_files,
    size_of,
)
from fedbn_flwr.lab.data.forms.own_records import Records
from fedbn_flwr.lab.data.forms.request import (
    OwnData,
    chosen_task,
    shown,
    tasks_of_classes,
)

logger = logging.getLogger("flwr")

_PARTS = {"train": False, "training": False, "test": True, "testing": True}
_VALIDATION = {"val", "valid", "validation"}
# largest number of files whose headers are read to find the sizes of the images
_MOST_HEADERS = 1000


class FolderPlace(NamedTuple):
    """Client, part and class of the images in a folder.

    The client or the part is "" if the path of the folder has none.
    """

    client: str
    part: str
    label: str


def read_folder(request: OwnData) -> Records:
    """Return the image files of a folder with client, part and class of each.

    Raises:
        ConfigError: the task does not fit the folder.
        DataError: the folder has no images, another number of classes, two spellings
            of a class, or none of the layouts.
    """
    # All folders must have the same layout: all or none are in a client's folder, and
    # all or none are in a train or test folder.
    root = request.existing()
    folders = _image_folders(root)
    if request.known_classes and not _are_classes(request, folders):
        return _without_classes(request, folders)
    places = {folder: _place(request, folder.relative_to(root)) for folder in folders}
    layouts = {(bool(place.client), bool(place.part)) for place in places.values()}
    if len(layouts) > 1:
        raise request.problem(
            "some images are below a client folder (or a train or test folder), but"
            " others are not. Give all images the same layout."
        )
    # List the files in the order of their paths, and the place of each.
    paths, of_files = list[Path](), list[FolderPlace]()
    for folder, names in sorted(folders.items()):
        paths += [folder / name for name in names]
        of_files += [places[folder]] * len(names)
    if not paths:
        raise request.problem(
            f"no image files ({', '.join(SUFFIXES)}) in folders below it. Put them into"
            " class/file, client/class/file or client/train/class/file."
        )
    classes = [*request.known_classes] or sorted({at.label for at in places.values()})
    # Two names are spellings of one class, unless a client has a folder for each class.
    spelt = {one: unicodedata.normalize("NFKC", one).casefold() for one in classes}
    folded = Counter(spelt.values())
    twice = [ascii(one) for one in classes if folded[spelt[one]] > 1]
    most = max(Counter(place[:2] for place in places.values()).values())
    if len(folded) < len(classes) and most < len(classes):
        raise request.problem(
            f"some class folders, {shown(twice, 100)}, differ only in"
            " capital letters or in the encoding of a character, and no client has all"
            " of them. If they are one class, rename them to one name. If they are"
            " different classes, give one client a folder for each class; it may be"
            " empty."
        )
    _check_classes(request, classes, {place.label for place in of_files})
    task = chosen_task(request, tasks_of_classes(len(classes)))
    given: dict[str, Any] = {}
    if of_files[0].client:
        clients = [place.client for place in of_files]
        sites, numbers = np.unique(clients, return_inverse=True)
        given = {"clients": numbers, "client_names": tuple(sites.tolist())}
    return Records(
        paths=paths,
        targets=torch.tensor([classes.index(place.label) for place in of_files]),
        task=task,
        num_classes=task.outputs(len(classes)),
        class_names=tuple(classes),
        sizes=_sizes(paths),
        tests=_tests(request, [place.part for place in of_files]),
        **given,
    )


def _are_classes(request: OwnData, folders: Mapping[Path, list[str]]) -> bool:
    """Return whether the folders with images have the names of known classes."""
    names = {folder.name for folder, images in folders.items() if images}
    in_root = folders.get(Path(request.path))
    return not in_root and bool(names) and names <= {*request.known_classes}


def _without_classes(request: OwnData, folders: Mapping[Path, list[str]]) -> Records:
    """Return all images of the folders, in the order of their paths."""
    paths = [folder / name for folder, names in folders.items() for name in names]
    if not paths:
        raise request.problem(
            f"no image files ({', '.join(SUFFIXES)}) in it. Put the images there."
        )
    return Records.unlabelled(request, sorted(paths), _sizes(sorted(paths)))


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
        below[:] = [step for step in below if not step.startswith(".")]
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

"""Folders of image files: ``class/file``, ``client/class/file`` or ``client/{train,test}/class/file``.

Also ``{train,test}/class/file``. The names of the class folders, in the order of the alphabet, are the classes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedbn_flwr.lab.data.folders import SUFFIXES
from fedbn_flwr.lab.data.image_files.inspection import look_at_files, refuse_damaged
from fedbn_flwr.lab.data.own.records import Records
from fedbn_flwr.lab.data.own.request import OwnData, chosen_task, numbered, shown

__all__ = ["read_folder"]

_PARTS = {"train": False, "training": False, "test": True, "testing": True}
_VALIDATION = {"val", "valid", "validation"}


class Place(NamedTuple):
    """Client, part and class of the images in a folder; "" where its path does not say."""

    client: str
    part: str
    label: str


def read_folder(request: OwnData) -> Records:
    """Return the image files of a folder and what their paths say.

    Raises:
        ConfigError: the task does not fit the folder.
        DataError: the folder has no images, another number of classes, or none of the layouts; files are damaged.
    """
    from PIL import Image

    root = request.existing()
    if not root.is_dir():
        raise request.problem("it is a file; a folder of image folders needed.")
    folders, others = _image_folders(root)
    places = {folder: _place(request, root, folder) for folder in folders}
    _refuse_mixed_layouts(request, root, places)
    classes = _classes(request, folders, places)

    paths, of_files = list[Path](), list[Place]()
    for folder, names in sorted(folders.items()):
        paths += [folder / name for name in names]
        of_files += [places[folder]] * len(names)
    if not paths:
        raise request.problem(
            f"no image files ({', '.join(SUFFIXES)}) in folders below it. Put them into class/file, client/class/file "
            f"or client/train/class/file. Found: {shown(sorted(os.listdir(root)))}."
        )
    refuse_damaged(look_at_files(paths))
    with Image.open(paths[0]) as first:
        width, height = first.size

    allowed = ("classification", "binary") if len(classes) == 2 else ("classification",)
    task = chosen_task(request, "classification", allowed)
    numbers = {name: number for number, name in enumerate(classes)}
    clients, client_names = numbered([place.client for place in of_files])
    has_clients = client_names != ("",)
    return Records(
        inputs=paths,
        targets=torch.tensor([numbers[place.label] for place in of_files]),
        task=task,
        num_classes=1 if task.name == "binary" else len(classes),
        class_names=classes,
        size=(height, width),
        clients=clients if has_clients else None,
        client_names=client_names if has_clients else (),
        tests=_tests(request, [place.part for place in of_files]),
        notes=_note_of_others(others),
    )


def _image_folders(root: Path) -> tuple[dict[Path, list[str]], list[str]]:
    """Return the innermost folders with the sorted names of their image files, and the other files.

    A folder without images is one, too: its class is known. Hidden files and folders are left out.
    """
    folders, others = dict[Path, list[str]](), list[str]()
    for name_of_folder, below, files in os.walk(root, followlinks=True):
        folder, images = Path(name_of_folder), list[str]()
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(name for name in files if not name.startswith(".")):
            if os.path.splitext(name)[1].lower() in SUFFIXES:
                images.append(name)
            else:
                others.append(str((folder / name).relative_to(root)))
        if images or (not below and folder != root):
            folders[folder] = images
    return folders, others


def _note_of_others(others: Sequence[str]) -> tuple[str, ...]:
    if not others:
        return ()
    return (f"left out, as they are no image files: {len(others)} ({shown(others, 5)})",)


def _place(request: OwnData, root: Path, folder: Path) -> Place:
    """Return the place of a folder's images."""
    steps = folder.relative_to(root).parts
    if not steps:
        raise request.problem("image files lie in the folder itself. Put them into a folder for each class.")
    *above, label = steps
    if any(step.lower() in _VALIDATION for step in above):
        raise request.problem(
            f"{folder.relative_to(root)} lies in a validation folder. Call it test, or move its images into train and "
            "set validation-share."
        )
    part = next((step for step in above if step.lower() in _PARTS), "")
    rest = [step for step in above if step != part]
    if len(rest) > 1:
        raise request.problem(
            f"{folder.relative_to(root)} is {len(steps)} folders deep. Known are class/file, client/class/file, and "
            "train and test between client and class."
        )
    return Place(rest[0] if rest else "", part.lower(), label)


def _refuse_mixed_layouts(request: OwnData, root: Path, places: Mapping[Path, Place]) -> None:
    """Raise DataError if some images have a client (or a part) and others have none, or parts are called classes."""
    for which, what in ((0, "client folder"), (1, "train or test folder")):
        having = [folder for folder, place in places.items() if place[which]]
        if having and len(having) < len(places):
            without = next(folder for folder in places if folder not in having)
            raise request.problem(
                f"{having[0].relative_to(root)} has a {what}, {without.relative_to(root)} has none. Give all images "
                "the same layout."
            )
    labels = {place.label for place in places.values()}
    parts = sorted(label for label in labels if label.lower() in {*_PARTS, *_VALIDATION})
    if len(parts) > 1:  # one of these alone may be a class, of vehicles say
        raise request.problem(
            f"folders of classes are called {shown(parts)}. The class lies below train and test, as in "
            "train/class/file or client/train/class/file."
        )


def _classes(request: OwnData, folders: Mapping[Path, Sequence[str]], places: Mapping[Path, Place]) -> tuple[str, ...]:
    """Return the names of the classes."""
    names = sorted({place.label for place in places.values()})
    with_images = {places[folder].label for folder, images in folders.items() if images}
    empty = [name for name in names if name not in with_images]
    wanted = 2 if request.task == "binary" else request.num_classes
    if wanted and with_images and wanted != len(names):
        # Each client numbers its own folders: with one less, all later classes would have another number.
        raise request.problem(
            f"{wanted} classes needed, and there are class folders {shown(names)}. Give each class a folder, at each "
            "client by the same name; it may be empty."
        )
    if empty and with_images and not wanted:
        raise request.problem(
            f"no image files in class folders {shown(empty)}. Remove them, or set num-classes={len(names)} if other "
            "data have these classes."
        )
    if len(names) == 1:
        raise request.problem(f"one class folder only ({names[0]}); two or more needed. Is the path too deep?")
    return tuple(names)


def _tests(request: OwnData, parts: Sequence[str]) -> NDArray[np.bool_] | None:
    """Return which images are tests by their folders; None if the folders do not say."""
    if not any(parts):
        return None
    tests = np.array([_PARTS[part] for part in parts])
    if tests.all() or not tests.any():
        lacks = "training" if tests.all() else "test"
        raise request.problem(
            f"it has no {lacks} images. Add them, or leave the folders train and test out: then test-share of the "
            "images are tests."
        )
    return tests

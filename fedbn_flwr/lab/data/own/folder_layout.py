"""Where image files lie below a folder: ``class/file``, ``client/class/file`` or ``client/{train,test}/class/file``.

Also ``{train,test}/class/file``. For segmentation ``images/file`` and ``masks/file`` take the place of class folders.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.folders import SUFFIXES
from fedbn_flwr.lab.data.names import one_form
from fedbn_flwr.lab.data.own.request import OwnData, shown

__all__ = ["PARTS", "FolderFiles", "Place", "find_images"]

PARTS = {"train": False, "training": False, "test": True, "testing": True}
"""Names of the folders between client and class, and whether their images are test examples."""

_VALIDATION = {"val", "valid", "validation"}
_PIXELS = {"images", "masks"}
_MASKS = (".png", ".tif", ".tiff", ".bmp")
_ENDINGS = ("", "_mask", "-mask", "_label", "_labels", "_seg", "_segmentation", "_gt")
_WITH_LOSS = (".jpg", ".jpeg", ".webp")


class Place(NamedTuple):
    """Client, part and class of an image; "" where its path does not say."""

    client: str
    part: str
    label: str


@dataclass
class FolderFiles:
    """What is below a folder.

    Attributes:
        by_pixel: whether the pixels of the images have classes.
        others: files that are no images.
        folders: folders of images, also empty ones.
        paths: the image files, in the order of their paths.
        places: place of each image.
        masks: for segmentation the mask of each image.
    """

    by_pixel: bool
    others: list[str]
    folders: set[Path]
    paths: list[Path] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    masks: list[Path] = field(default_factory=list)

    def without(self, numbers: Collection[int]) -> FolderFiles:
        """Return the files but those with these numbers."""
        kept = [number for number in range(len(self.paths)) if number not in numbers]
        return replace(
            self,
            paths=[self.paths[number] for number in kept],
            places=[self.places[number] for number in kept],
            masks=[self.masks[number] for number in kept] if self.masks else [],
        )


def find_images(request: OwnData) -> FolderFiles:
    """Return the image files below a folder, and what their paths say.

    Raises:
        DataError: the folder has no images, or the folders do not have one of the layouts.
    """
    root = request.existing()
    if not root.is_dir():
        raise DataError(f"dataset={request.name!r} is a file; a folder of image folders needed.")
    folders, others, empty = _image_folders(root)
    request.refuse_odd_names([str(root), *others, *(f"{f}/{name}" for f, names in folders.items() for name in names)])
    if not folders:
        raise request.problem(
            f"no image files ({', '.join(SUFFIXES)}) in folders below it. Put them into "
            f"class/file, client/class/file or client/train/class/file. Found: {shown(sorted(os.listdir(root)))}."
        )
    places = {folder: _place(request, root, folder) for folder in folders}
    _same_depth(request, root, places)
    _refuse_parts_as_classes(request, {place.label for place in places.values()})
    by_pixel = any(place.label in _PIXELS for place in places.values())
    files = FolderFiles(by_pixel, others, {*empty})
    for folder, names in sorted(folders.items()):
        if by_pixel and folder.name == "masks":
            continue
        if by_pixel:
            files.masks += _masks(request, folder, names)
        files.paths += [folder / name for name in names]
        files.places += [places[folder]] * len(names)
        files.folders.add(folder)
    return files


def _image_folders(root: Path) -> tuple[dict[Path, list[str]], list[str], list[Path]]:
    """Return the folders with image files and the sorted names of these; other files; innermost folders without images.

    Hidden files and folders are left out.
    """
    folders, others, empty = dict[Path, list[str]](), list[str](), list[Path]()
    for name_of_folder, below, files in os.walk(root, followlinks=True):
        folder, images = Path(name_of_folder), list[str]()
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(name for name in files if not name.startswith(".")):
            if os.path.splitext(name)[1].lower() in SUFFIXES:
                images.append(name)
            else:
                others.append(str((folder / name).relative_to(root)))
        if images:
            folders[folder] = images
        elif not below:
            empty.append(folder)
    return folders, others, empty


def _place(request: OwnData, root: Path, folder: Path) -> Place:
    """Return the place of a folder's images."""
    steps = list(folder.relative_to(root).parts)
    if not steps:
        raise request.problem(
            f"image files lie in the folder itself ({shown(sorted(os.listdir(root)))}). Put them into a folder for "
            "each class."
        )
    label, above = steps[-1], steps[:-1]
    if any(step.lower() in _VALIDATION for step in above):
        raise request.problem(
            f"{folder.relative_to(root)} lies in a validation folder. Call it test, or move its images into train and "
            "set validation-share."
        )
    part = next((step for step in above if step.lower() in PARTS), "")
    rest = [step for step in above if step != part]
    if len(rest) > 1:
        raise request.problem(
            f"{folder.relative_to(root)} is {len(steps)} folders deep. Known are class/file, client/class/file, and "
            "train and test between client and class."
        )
    return Place(one_form(rest[0]) if rest else "", part.lower(), one_form(label))


def _same_depth(request: OwnData, root: Path, places: dict[Path, Place]) -> None:
    """Raise DataError if some images have a client (or a part) and others have none."""
    for which, what in ((0, "client folder"), (1, "train or test folder")):
        having = [folder for folder, place in places.items() if place[which]]
        if having and len(having) < len(places):
            without = next(folder for folder in places if folder not in having)
            raise request.problem(
                f"{having[0].relative_to(root)} has a {what}, {without.relative_to(root)} has none. Give all images "
                "the same layout."
            )


def _refuse_parts_as_classes(request: OwnData, labels: set[str]) -> None:
    """Raise DataError if classes are called train and test; one of these alone may be a class, of vehicles say."""
    parts = sorted(label for label in labels if label.lower() in {*PARTS, *_VALIDATION})
    if len(parts) > 1:
        raise request.problem(
            f"folders of classes are called {shown(parts)}. The class lies below train and test, as in "
            "train/class/file or client/train/class/file."
        )


def _masks(request: OwnData, folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the files with the classes of the images' pixels.

    Raises:
        DataError: an image has none, or two images differ in their suffix alone and would have one.
    """
    root, masks, by_stem = folder.parent / "masks", list[Path](), dict[str, str]()
    for name in names:
        stem = Path(name).stem
        if (twin := by_stem.setdefault(stem, name)) != name:
            raise request.problem(
                f"in {folder} {twin} and {name} have one mask, {stem}. Rename one of them, and give each its own."
            )
        masks.append(_mask(request, folder / name, root))
    return masks


def _mask(request: OwnData, image: Path, root: Path) -> Path:
    """Return the mask of an image in a folder: NAME.png, NAME_mask.png or the like."""
    found = [root / f"{image.stem}{ending}{suffix}" for ending in _ENDINGS for suffix in (*_MASKS, *_WITH_LOSS)]
    found = list(filter(Path.is_file, found))
    if not found:
        raise request.problem(
            f"image {image} has no mask {root / image.stem}.png, nor {image.stem}_mask.png (classes of pixels, 255 = "
            "ignored)."
        )
    if found[0].suffix in _WITH_LOSS:
        raise request.problem(f"mask {found[0]} is compressed with loss, which changes its classes. Save them as PNG.")
    return found[0]

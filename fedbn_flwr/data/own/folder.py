"""Folders of image files: ``class/file``, ``client/class/file`` or ``client/{train,test}/class/file``.

Also ``{train,test}/class/file``. For segmentation ``images/file`` and ``masks/file`` take the place of class folders.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedbn_flwr.data.folders import SUFFIXES
from fedbn_flwr.data.image_files import look_at_files
from fedbn_flwr.data.own.request import (
    Found,
    OwnData,
    chosen_task,
    left_out,
    numbered,
    numbered_classes,
    shown,
    warning_of_gaps,
)
from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.training.tasks import Task

__all__ = ["read_folder"]

PARTS = {"train": False, "training": False, "test": True, "testing": True}
_VALIDATION = {"val", "valid", "validation"}
_PIXELS = {"images", "masks"}


Place = tuple[str, str, str]
"""(client, part, class) of an image; "" where its path does not say."""


@dataclass
class _Files:
    """The image files, and for each its place and, for segmentation, its mask."""

    paths: list[Path]
    places: list[Place]
    masks: list[Path]

    def without(self, numbers: Collection[int]) -> _Files:
        """Return the files but those with these numbers."""
        kept = [number for number in range(len(self.paths)) if number not in numbers]
        masks = [self.masks[number] for number in kept] if self.masks else []
        return _Files([self.paths[number] for number in kept], [self.places[number] for number in kept], masks)


def read_folder(request: OwnData) -> Found:
    """Return the image files of a folder and what their paths say.

    Raises:
        ConfigError: keys of tables are set.
        DataError: the folder has no images, or the folders do not have one of the layouts; files cannot be read.
    """
    from PIL import Image

    files, by_pixel, others, folders = _files(request)
    seen = look_at_files(files.paths, whole=request.skip_unreadable)
    problems = dict(seen.problems)
    values = _look_at_masks(files.paths, files.masks, problems)
    notes = (
        *_notes_of_unreadable(request, len(files.paths), problems),
        *_notes_of_unused(request, files.paths, {"pages after the first": seen.pages, "alpha channels": seen.alpha}),
        *left_out(request, others),
    )
    files = files.without(problems)
    if unused := sorted(folders - {path.parent for path in files.paths}):
        named = shown([folder.relative_to(request.path).as_posix() for folder in unused])
        notes += (f"no usable image in {named}: a class without another folder is left out",)
    if not files.paths:
        raise DataError(f"dataset={request.name!r}: none of the image files can be read.")
    clients, client_names = numbered([client for client, _, _ in files.places])
    has_clients = client_names != ("",)
    with Image.open(files.paths[0]) as first:
        width, height = first.size
    targets: torch.Tensor | Sequence[Path]
    warnings: tuple[str, ...] = ()
    if by_pixel:
        task, outputs, names = _segmentation(request, values)
        targets = files.masks
        classes = values - {255}
        warnings = warning_of_gaps(request, len(classes), max(classes, default=0))
    else:
        targets, task, outputs, names = _classes(request, [label for _, _, label in files.places])
    return Found(
        inputs=files.paths,
        targets=targets,
        task=task,
        num_classes=outputs,
        class_names=names,
        clients=clients if has_clients else None,
        client_names=client_names if has_clients else (),
        tests=_tests(request, [part for _, part, _ in files.places]),
        size=(height, width),
        notes=notes,
        warnings=warnings,
    )


def _files(request: OwnData) -> tuple[_Files, bool, list[str], set[Path]]:
    """Return the image files in the order of their paths, and what else is there.

    Returns:
        The image files, whether their pixels have classes, the other files, and the folders of images, also empty ones.
    """
    root = request.existing()
    if not root.is_dir():
        raise DataError(f"dataset={request.name!r} is a file; a folder of image folders needed.")
    folders, others, empty = _image_folders(root)
    if not folders:
        raise DataError(
            f"dataset={request.name!r}: no image files ({', '.join(SUFFIXES)}) in folders below it. Put them into "
            f"class/file, client/class/file or client/train/class/file. Found: {shown(sorted(os.listdir(root)))}."
        )
    places = {folder: _place(request, root, folder) for folder in folders}
    _same_depth(request, root, places)
    _refuse_parts_as_classes(request, {label for _, _, label in places.values()})
    by_pixel = any(label in _PIXELS for _, _, label in places.values())
    found = _Files([], [], [])
    for folder in sorted(folders):
        if by_pixel and folder.name == "masks":
            continue
        names = folders[folder]
        if by_pixel:
            _refuse_twins(request, folder, names)
        found.paths += [folder / name for name in names]
        found.places += [places[folder]] * len(names)
        found.masks += [_mask(request, folder, name) for name in names] if by_pixel else []
    return found, by_pixel, others, {*empty, *(path.parent for path in found.paths)}


def _notes_of_unreadable(request: OwnData, num_files: int, problems: Mapping[int, str]) -> tuple[str, ...]:
    """Return the note of files that are left out; DataError if they may not be."""
    if not problems:
        return ()
    listed = "\n".join(list(problems.values())[:10])
    listed += f"\nand {len(problems) - 10} more" if len(problems) > 10 else ""
    if not request.skip_unreadable:
        raise DataError(
            f"dataset={request.name!r}: {len(problems)} of {num_files} image files cannot be read:\n{listed}\n"
            "Repair or remove them, or leave them out with skip-unreadable=true."
        )
    return (f"{len(problems)} of {num_files} image files are left out, they cannot be read:\n{listed}",)


def _notes_of_unused(request: OwnData, paths: Sequence[Path], unused: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Return the note of what some files have and no model sees."""
    return tuple(
        f"{what} of {len(numbers)} of {len(paths)} image files are not used "
        f"({shown([paths[number].relative_to(request.path).as_posix() for number in numbers], 5)})"
        for what, numbers in unused.items()
        if numbers
    )


def _tests(request: OwnData, parts: Sequence[str]) -> NDArray[np.bool_] | None:
    """Return which images are tests by their folders; None if the folders do not say."""
    if not any(parts):
        return None
    tests = np.array([PARTS.get(part, False) for part in parts])
    if tests.all() or not tests.any():
        lacks = "training" if tests.all() else "test"
        raise DataError(
            f"dataset={request.name!r} has no {lacks} images: the folders are {shown(sorted(set(parts)))}. "
            "Add the other one, or leave the folders train and test out: then test-share of the images are tests."
        )
    return tests


def _segmentation(request: OwnData, values: set[int]) -> tuple[Task, int, tuple[str, ...]]:
    """Return task, number of outputs and names of the classes of masks that have these values."""
    classes = values - {255}
    largest = max(classes, default=0)
    task = chosen_task(request, "segmentation", ("segmentation",))
    if request.num_classes and request.num_classes <= largest:
        raise ConfigError(
            f"num-classes={request.num_classes}, and the masks of dataset={request.name!r} have class {largest}: "
            f"{largest + 1} or more needed. 255 is for pixels that do not count."
        )
    if values == {0, 255}:
        raise DataError(
            f"dataset={request.name!r}: the masks have the values 0 and 255, and 255 is for pixels that do not "
            "count. Save the classes as 0 and 1."
        )
    return task, request.num_classes or max(largest + 1, 2), ()


def _classes(request: OwnData, found: Sequence[str]) -> tuple[torch.Tensor, Task, int, tuple[str, ...]]:
    """Return the targets of images in class folders, the task, the number of outputs and the names of the classes."""
    labels, names = numbered_classes(request, found, "class folders")
    allowed = ("classification", *(("binary",) if len(names) == 2 else ()))
    task = chosen_task(request, "classification", allowed)
    if len(names) < 2:
        raise DataError(
            f"dataset={request.name!r} has one class folder only ({shown(names)}); two or more needed. Is the path "
            "one folder too deep?"
        )
    if request.num_classes and request.num_classes < len(names):
        raise ConfigError(
            f"num-classes={request.num_classes} is fewer than the {len(names)} class folders of dataset="
            f"{request.name!r} ({shown(names)})."
        )
    outputs = 1 if task.name == "binary" else max(len(names), request.num_classes)
    return torch.from_numpy(labels), task, outputs, names


def _image_folders(root: Path) -> tuple[dict[Path, list[str]], list[str], list[Path]]:
    """Return the folders with image files and the sorted names of these; other files; innermost folders without images.

    Hidden files and folders are left out.
    """
    found: dict[Path, list[str]] = {}
    others, empty = list[str](), list[Path]()
    for folder, below, files in os.walk(root, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        files = sorted(name for name in files if not name.startswith("."))
        names = [name for name in files if os.path.splitext(name)[1].lower() in SUFFIXES]
        images = set(names)
        others += [str((Path(folder) / name).relative_to(root)) for name in files if name not in images]
        if names:
            found[Path(folder)] = names
        elif not below:
            empty.append(Path(folder))
    return found, others, empty


def _place(request: OwnData, root: Path, folder: Path) -> Place:
    """Return the place of a folder's images."""
    steps = list(folder.relative_to(root).parts)
    if not steps:
        raise DataError(
            f"dataset={request.name!r}: image files lie in the folder itself ({shown(sorted(os.listdir(root)))}). Put "
            "them into a folder for each class."
        )
    label, above = steps[-1], steps[:-1]
    if any(step.lower() in _VALIDATION for step in above):
        raise DataError(
            f"dataset={request.name!r}: {folder.relative_to(root)} lies in a validation folder. Call it test, or move "
            "its images into train and set validation-share."
        )
    part = next((step for step in above if step.lower() in PARTS), "")
    rest = [step for step in above if step != part]
    if len(rest) > 1:
        raise DataError(
            f"dataset={request.name!r}: {folder.relative_to(root)} is {len(steps)} folders deep. Known are class/file, "
            "client/class/file, and train and test between client and class."
        )
    return rest[0] if rest else "", part.lower(), label


def _same_depth(request: OwnData, root: Path, places: dict[Path, Place]) -> None:
    """Raise DataError if some images have a client (or a part) and others have none."""
    for which, what in ((0, "client folder"), (1, "train or test folder")):
        having = [folder for folder, place in places.items() if place[which]]
        if having and len(having) < len(places):
            without = next(folder for folder in places if folder not in having)
            raise DataError(
                f"dataset={request.name!r}: {having[0].relative_to(root)} has a {what}, "
                f"{without.relative_to(root)} has none. Give all images the same layout."
            )


def _refuse_parts_as_classes(request: OwnData, labels: set[str]) -> None:
    """Raise DataError if classes are called train and test; one of these alone may be a class, of vehicles say."""
    parts = sorted(label for label in labels if label.lower() in {*PARTS, *_VALIDATION})
    if len(parts) > 1:
        raise DataError(
            f"dataset={request.name!r}: folders of classes are called {shown(parts)}. The class lies below train and "
            "test, as in train/class/file or client/train/class/file."
        )


def _refuse_twins(request: OwnData, folder: Path, names: Sequence[str]) -> None:
    """Raise DataError if two images differ in their suffix alone: they would have one mask."""
    by_stem: dict[str, list[str]] = {}
    for name in names:
        by_stem.setdefault(Path(name).stem, []).append(name)
    if twins := [two for two in by_stem.values() if len(two) > 1]:
        raise DataError(
            f"dataset={request.name!r}: in {folder} {' and '.join(twins[0])} have one mask, {Path(twins[0][0]).stem}. "
            "Rename one of them, and give each its own."
        )


def _mask(request: OwnData, folder: Path, name: str) -> Path:
    """Return the file with the classes of an image's pixels."""
    for suffix in (".png", ".tif", ".tiff", ".bmp"):
        path = folder.parent / "masks" / f"{Path(name).stem}{suffix}"
        if path.is_file():
            return path
    raise DataError(
        f"dataset={request.name!r}: image {folder / name} has no mask {folder.parent / 'masks' / Path(name).stem}.png "
        "(classes of pixels, 255 = ignored)."
    )


def _look_at_masks(paths: Sequence[Path], masks: Sequence[Path], problems: dict[int, str]) -> set[int]:
    """Return the values in the masks.

    Masks that cannot be read, have several channels, or not the size of their image are added to ``problems``.
    """
    from PIL import Image

    values: set[int] = set()
    for number, path in enumerate(masks):
        try:
            with Image.open(path) as image:
                pixels = np.array(image)
            if pixels.ndim != 2 or pixels.dtype not in (np.uint8, np.bool_):
                raise ValueError(f"{pixels.dtype} of shape {pixels.shape}; one byte a pixel, its class, needed")
            if number not in problems:
                with Image.open(paths[number]) as image:
                    size = image.size
                # A TIFF may be turned when it is read: reading refuses one whose mask is not.
                if sorted(size) != sorted(pixels.shape):
                    raise ValueError(
                        f"it is of {pixels.shape[1]} x {pixels.shape[0]} pixels, its image of {size[0]} x {size[1]}; "
                        "save both in one size"
                    )
        except (OSError, ValueError, SyntaxError) as error:
            problems[number] = f"mask {path} cannot be read: {error}"
            continue
        values |= set(np.unique(pixels.astype(np.uint8)).tolist())
    return values

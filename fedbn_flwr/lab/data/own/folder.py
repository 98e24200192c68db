"""Folders of image files; see ``folder_layout`` for where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data.image_files.inspection import first_of, look_at_files
from fedbn_flwr.lab.data.own.folder_layout import PARTS, FolderFiles, find_images
from fedbn_flwr.lab.data.own.records import Inputs, Records, Targets
from fedbn_flwr.lab.data.own.request import (
    OwnData,
    chosen_task,
    left_out,
    numbered,
    numbered_classes,
    shown,
    warning_of_gaps,
)

__all__ = ["read_folder"]


def read_folder(request: OwnData) -> Records:
    """Return the image files of a folder and what their paths say.

    Raises:
        ConfigError: the task or the number of classes does not fit the folder.
        DataError: the folder has no images, or the folders do not have one of the layouts; files cannot be read.
    """
    from PIL import Image

    files = find_images(request)
    seen = look_at_files(files.paths, whole=request.skip_unreadable)
    problems = dict(seen.problems)
    values = _look_at_masks(files.paths, files.masks, problems)
    notes = [
        *_notes_of_unreadable(request, len(files.paths), problems),
        *_notes_of_unused(request, files.paths, {"pages after the first": seen.pages, "alpha channels": seen.alpha}),
        *left_out(request, files.others),
    ]
    files = files.without(problems)
    notes += _note_of_empty_classes(request, files)
    if not files.paths:
        raise request.problem("none of the image files can be read.")
    clients, client_names = numbered([place.client for place in files.places])
    with Image.open(files.paths[0]) as first:
        width, height = first.size
    return Records(
        inputs=Inputs(files.paths, size=(height, width)),
        targets=_segmentation(request, files.masks, values) if files.by_pixel else _classes(request, files),
        clients=None if client_names == ("",) else clients,
        client_names=() if client_names == ("",) else client_names,
        tests=_tests(request, [place.part for place in files.places]),
        notes=tuple(notes),
    )


def _look_at_masks(paths: Sequence[Path], masks: Sequence[Path], problems: dict[int, str]) -> set[int]:
    """Return the values in the masks.

    Masks that cannot be read, have several channels, or not the size of their image are added to ``problems``.
    """
    values: set[int] = set()
    for number, mask in enumerate(masks):
        try:
            pixels = _mask_pixels(mask, None if number in problems else paths[number])
        except (OSError, ValueError, SyntaxError) as error:
            problems[number] = f"mask {mask} cannot be read: {error}"
        else:
            values |= set(np.unique(pixels.astype(np.uint8)).tolist())
    return values


def _mask_pixels(mask: Path, image: Path | None) -> Any:
    """Return the pixels of a mask; ValueError unless each is a byte, and the mask has the size of the image."""
    from PIL import Image

    with Image.open(mask) as file:
        pixels = np.array(file)
    if pixels.ndim != 2 or pixels.dtype not in (np.uint8, np.bool_):
        raise ValueError(f"{pixels.dtype} of shape {pixels.shape}; one byte a pixel, its class, needed")
    if image is not None:
        with Image.open(image) as file:
            width, height = file.size
        # A TIFF may be turned when it is read: reading refuses one whose mask is not.
        if sorted((width, height)) != sorted(pixels.shape):
            raise ValueError(
                f"it is of {pixels.shape[1]} x {pixels.shape[0]} pixels, its image of {width} x {height}; save both "
                "in one size"
            )
    return pixels


def _notes_of_unreadable(request: OwnData, num_files: int, problems: Mapping[int, str]) -> tuple[str, ...]:
    """Return the note of files that are left out; DataError if they may not be."""
    if not problems:
        return ()
    listed = first_of(list(problems.values()))
    if not request.skip_unreadable:
        raise request.problem(
            f"{len(problems)} of {num_files} image files cannot be read:\n{listed}\n"
            "Repair or remove them, or leave them out with skip-unreadable=true."
        )
    return (f"{len(problems)} of {num_files} image files are left out, they cannot be read:\n{listed}",)


def _notes_of_unused(request: OwnData, paths: Sequence[Path], unused: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the note of what some files have and no model sees."""
    notes = []
    for what, numbers in unused.items():
        names = shown([paths[number].relative_to(request.path).as_posix() for number in numbers], 5)
        if numbers:
            notes.append(f"{what} of {len(numbers)} of {len(paths)} image files are not used ({names})")
    return notes


def _note_of_empty_classes(request: OwnData, files: FolderFiles) -> tuple[str, ...]:
    """Return the note of folders without an image that can be read."""
    unused = sorted(files.folders - {path.parent for path in files.paths})
    named = shown([folder.relative_to(request.path).as_posix() for folder in unused])
    return (f"no usable image in {named}: a class without another folder is left out",) if unused else ()


def _segmentation(request: OwnData, masks: Sequence[Path], values: set[int]) -> Targets:
    """Return the masks, which have these values, as targets."""
    classes = values - {255}
    largest = max(classes, default=0)
    task = chosen_task(request, "segmentation", ("segmentation",))
    if request.num_classes and request.num_classes <= largest:
        raise ConfigError(
            f"num-classes={request.num_classes}, and the masks of dataset={request.name!r} have class {largest}: "
            f"{largest + 1} or more needed. 255 is for pixels that do not count."
        )
    if values == {0, 255}:
        raise request.problem(
            "the masks have the values 0 and 255, and 255 is for pixels that do not count. Save the classes as 0 and 1."
        )
    outputs = request.num_classes or max(largest + 1, 2)
    return Targets(masks, task, outputs, warnings=warning_of_gaps(request, len(classes), largest))


def _classes(request: OwnData, files: FolderFiles) -> Targets:
    """Return the targets of images in class folders."""
    labels, names = numbered_classes(request, [place.label for place in files.places], "class folders")
    allowed = ("classification", "binary") if len(names) == 2 else ("classification",)
    task = chosen_task(request, "classification", allowed)
    if len(names) < 2:
        raise DataError(
            f"dataset={request.name!r} has one class folder only ({shown(names)}); two or more needed. Is the path "
            "one folder too deep?"
        )
    if request.num_classes and request.num_classes < len(names):
        raise ConfigError(
            f"num-classes={request.num_classes} is fewer than the {len(names)} class folders of "
            f"dataset={request.name!r} ({shown(names)})."
        )
    outputs = 1 if task.name == "binary" else max(len(names), request.num_classes)
    return Targets(torch.from_numpy(labels), task, outputs, names)


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

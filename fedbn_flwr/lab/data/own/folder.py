"""Folders of image files; see ``folder_layout`` for where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data.image_files.decoding import FULL, Window
from fedbn_flwr.lab.data.image_files.inspection import first_of, look_at_files
from fedbn_flwr.lab.data.own.folder_layout import PARTS, FolderFiles, find_images
from fedbn_flwr.lab.data.own.masks import look_at_masks, pixel_targets
from fedbn_flwr.lab.data.own.records import Inputs, Records, Targets
from fedbn_flwr.lab.data.own.request import (
    OwnData,
    chosen_task,
    left_out,
    numbered,
    numbered_classes,
    shown,
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
    window = request.window()
    seen = look_at_files(files.paths, whole=request.skip_unreadable, window=window)
    problems = dict(seen.problems)
    values = look_at_masks(files.paths, files.masks, problems)
    notes = [
        *_notes_of_unreadable(request, len(files.paths), problems),
        *_notes_of_unused(request, files.paths, {"pages after the first": seen.pages, "alpha channels": seen.alpha}),
        *left_out(request, files.others),
        *_notes_of_deep(request, len(files.paths), seen.deep),
    ]
    files = files.without(problems)
    notes += _note_of_empty_classes(request, files)
    if not files.paths:
        raise request.problem("none of the image files can be read.")
    clients, client_names = numbered([place.client for place in files.places])
    with Image.open(files.paths[0]) as first:
        width, height = first.size
    return Records(
        inputs=Inputs(files.paths, size=(height, width), warnings=_warning_of_deep(window, seen.deep)),
        targets=pixel_targets(request, files.masks, values) if files.by_pixel else _classes(request, files),
        clients=None if client_names == ("",) else clients,
        client_names=() if client_names == ("",) else client_names,
        tests=_tests(request, [place.part for place in files.places]),
        notes=tuple(notes),
    )


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


def _notes_of_deep(request: OwnData, num_files: int, deep: Mapping[int, tuple[float, float]]) -> tuple[str, ...]:
    """Return the note of images with more than 8 bits a channel, and of an intensity range that has no use."""
    if not deep:
        return (f"intensity-range={request.intensity_range}: no image has more than 8 bits",) * bool(request.window())
    low, high = request.window() or FULL
    lowest, highest = _extremes(deep)
    return (
        f"{len(deep)} of {num_files} images have more than 8 bits, values {lowest:g} to {highest:g}: {low:g} becomes 0 "
        f"and {high:g} becomes 255, in 256 steps (intensity-range)",
    )


def _warning_of_deep(window: Window | None, deep: Mapping[int, tuple[float, float]]) -> tuple[str, ...]:
    """Return the warning that images of 16 bits use few of the 256 steps, if the config states no range."""
    if not deep or window is not None:
        return ()
    lowest, highest = _extremes(deep)
    if highest - lowest > FULL[1] / 4:
        return ()
    return (
        f"images with 16 bits have values {lowest:g} to {highest:g} only, and 0 to 65535 become 0 to 255: set "
        f"intensity-range={lowest:g},{highest:g}",
    )


def _extremes(deep: Mapping[int, tuple[float, float]]) -> tuple[float, float]:
    return min(low for low, _ in deep.values()), max(high for _, high in deep.values())


def _note_of_empty_classes(request: OwnData, files: FolderFiles) -> tuple[str, ...]:
    """Return the note of folders without an image that can be read."""
    unused = sorted(files.folders - {path.parent for path in files.paths})
    named = shown([folder.relative_to(request.path).as_posix() for folder in unused])
    return (f"no usable image in {named}: a class without another folder is left out",) if unused else ()


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

"""Folders of image files: ``class/file``, ``client/class/file`` or ``client/{train,test}/class/file``.

Also ``{train,test}/class/file``. For segmentation ``images/file`` and ``masks/file`` take the place of class folders.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fedbn_flwr.data.folders import SUFFIXES
from fedbn_flwr.data.image_files import unreadable
from fedbn_flwr.data.own.request import Found, OwnData, chosen_task, numbered, numbered_classes, shown
from fedbn_flwr.errors import ConfigError, DataError

__all__ = ["read_folder"]

PARTS = {"train": False, "training": False, "test": True, "testing": True}
_VALIDATION = {"val", "valid", "validation"}
_PIXELS = {"images", "masks"}


def read_folder(request: OwnData) -> Found:
    """Return the image files of a folder and what their paths say.

    Raises:
        ConfigError: keys of tables are set.
        DataError: the folder has no images, or the folders do not have one of the layouts; files cannot be read.
    """
    from PIL import Image

    root = request.existing()
    if not root.is_dir():
        raise DataError(f"dataset={request.name!r} is a file; a folder of image folders needed.")
    folders = _image_folders(root)
    if not folders:
        raise DataError(
            f"dataset={request.name!r}: no image files ({', '.join(SUFFIXES)}) in folders below it. Put them into "
            f"class/file, client/class/file or client/train/class/file. Found: {shown(sorted(os.listdir(root)))}."
        )
    places = {folder: _place(request, root, folder) for folder in folders}
    _same_depth(request, root, places)
    by_pixel = any(place[2] in _PIXELS for place in places.values())
    paths: list[Path] = []
    rows: list[tuple[str, str, str]] = []
    masks: list[Path] = []
    for folder in sorted(folders):
        if by_pixel and folder.name == "masks":
            continue
        files = folders[folder]
        paths += [folder / name for name in files]
        rows += [places[folder]] * len(files)
        if by_pixel:
            masks += [_mask(request, folder, name) for name in files]
    problems = unreadable(paths, whole=request.skip_unreadable)
    largest, only_ignored = (0, False) if not by_pixel else _look_at_masks(masks, problems)
    notes: list[str] = []
    if problems:
        listed = "\n".join(list(problems.values())[:10]) + (
            f"\nand {len(problems) - 10} more" if len(problems) > 10 else ""
        )
        if not request.skip_unreadable:
            raise DataError(
                f"dataset={request.name!r}: {len(problems)} of {len(paths)} image files cannot be read:\n{listed}\n"
                "Repair or remove them, or leave them out with skip-unreadable=true."
            )
        notes.append(f"{len(problems)} of {len(paths)} image files are left out, they cannot be read:\n{listed}")
        kept = [at for at in range(len(paths)) if at not in problems]
        paths, rows = [paths[at] for at in kept], [rows[at] for at in kept]
        masks = [masks[at] for at in kept] if masks else masks
    if not paths:
        raise DataError(f"dataset={request.name!r}: none of the image files can be read.")
    clients, client_names = numbered([client for client, _, _ in rows])
    has_clients = client_names != ("",)
    parts = np.array([part for _, part, _ in rows])
    tests = np.array([PARTS.get(part, False) for part in parts.tolist()]) if (parts != "").any() else None
    if tests is not None and (tests.all() or not tests.any()):
        lacks = "training" if tests.all() else "test"
        raise DataError(
            f"dataset={request.name!r} has no {lacks} images: the folders are {shown(sorted(set(parts.tolist())))}. "
            "Add the other one, or leave the folders train and test out: then test-share of the images are tests."
        )
    with Image.open(paths[0]) as first:
        width, height = first.size
    no_names: tuple[str, ...] = ()
    if by_pixel:
        task = chosen_task(request, "segmentation", ("segmentation",))
        if request.num_classes and request.num_classes <= largest:
            raise ConfigError(
                f"num-classes={request.num_classes}, and the masks of dataset={request.name!r} have class {largest}: "
                f"{largest + 1} or more needed. 255 is for pixels that do not count."
            )
        if only_ignored:
            raise DataError(
                f"dataset={request.name!r}: the masks have the values 0 and 255, and 255 is for pixels that do not "
                "count. Save the classes as 0 and 1."
            )
        outputs, names = request.num_classes or max(largest + 1, 2), no_names
        targets: torch.Tensor | Sequence[Path] = masks
    else:
        labels, names = numbered_classes(request, [label for _, _, label in rows], "class folders")
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
        outputs, targets = max(len(names), request.num_classes), torch.from_numpy(labels)
        outputs = 1 if task.name == "binary" else outputs
    return Found(
        paths,
        targets,
        task,
        outputs,
        names,
        clients if has_clients else None,
        client_names if has_clients else (),
        tests=tests,
        size=(height, width),
        notes=tuple(notes),
    )


def _image_folders(root: Path) -> dict[Path, list[str]]:
    """Return the folders with image files and the sorted names of these; hidden folders are left out."""
    found: dict[Path, list[str]] = {}
    for folder, below, files in os.walk(root, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        names = sorted(n for n in files if os.path.splitext(n)[1].lower() in SUFFIXES and not n.startswith("."))
        if names:
            found[Path(folder)] = names
    return found


def _place(request: OwnData, root: Path, folder: Path) -> tuple[str, str, str]:
    """Return (client, part, class) of a folder; "" where its path does not say."""
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


def _same_depth(request: OwnData, root: Path, places: dict[Path, tuple[str, str, str]]) -> None:
    """Raise DataError if some images have a client (or a part) and others have none."""
    for which, what in ((0, "client folder"), (1, "train or test folder")):
        having = [folder for folder, place in places.items() if place[which]]
        if having and len(having) < len(places):
            without = next(folder for folder in places if folder not in having)
            raise DataError(
                f"dataset={request.name!r}: {having[0].relative_to(root)} has a {what}, "
                f"{without.relative_to(root)} has none. Give all images the same layout."
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


def _look_at_masks(masks: Sequence[Path], problems: dict[int, str]) -> tuple[int, bool]:
    """Return the largest class in the masks, and whether they have the values 0 and 255 only.

    Masks that cannot be read, or have several channels, are added to ``problems``.
    """
    from PIL import Image

    values: set[int] = set()
    for number, path in enumerate(masks):
        try:
            with Image.open(path) as image:
                pixels = np.array(image)
            if pixels.ndim != 2 or pixels.dtype not in (np.uint8, np.bool_):
                raise ValueError(f"{pixels.dtype} of shape {pixels.shape}; one byte a pixel, its class, needed")
        except (OSError, ValueError, SyntaxError) as error:
            problems[number] = f"mask {path} cannot be read: {error}"
            continue
        values |= set(np.unique(pixels.astype(np.uint8)).tolist())
    return max(values - {255}, default=0), values == {0, 255}

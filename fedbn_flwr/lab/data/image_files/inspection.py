"""What is wrong with image files, and what of them is not used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.image_files.decoding import check_mode, for_all

__all__ = ["LookedAt", "first_of", "look_at_files", "refuse_damaged"]


@dataclass(frozen=True)
class LookedAt:
    """What a look at image files shows, by their numbers.

    Attributes:
        problems: why a file cannot be read.
        pages: files with several pages, of which the first is used.
        alpha: files with an alpha channel, which is not used.
    """

    problems: dict[int, str]
    pages: list[int]
    alpha: list[int]


def look_at_files(paths: Sequence[Path], *, whole: bool = False) -> LookedAt:
    """Return what is wrong with image files, and what of them is not used.

    Args:
        paths: the files.
        whole: decode each file. Else headers, and ends of JPEG and PNG files, are looked at; but once a file cannot be
            read all are decoded, so that all damaged ones are found together.
    """
    looks = for_all(len(paths), lambda number: _look(paths[number], whole))
    problems = {
        number: f"image {paths[number]} cannot be read: {look.problem}"
        for number, look in enumerate(looks)
        if look.problem
    }
    if problems and not whole:
        return look_at_files(paths, whole=True)
    pages = [number for number, look in enumerate(looks) if look.pages]
    alpha = [number for number, look in enumerate(looks) if look.alpha]
    return LookedAt(problems, pages, alpha)


class _Look(NamedTuple):
    """Why a file cannot be read, "" if it looks sound; whether it has several pages, and alpha."""

    problem: str
    pages: bool = False
    alpha: bool = False


def _look(path: Path, whole: bool) -> _Look:
    from PIL import Image

    try:
        with Image.open(path) as image:
            check_mode(image)
            if (bits := _bits(path, image)) > 8:
                raise ValueError(f"it has {bits} bits for each channel; save it with 8")
            pages = getattr(image, "is_animated", False) and image.format != "MPO"  # of a phone: a small copy
            alpha = image.has_transparency_data
            if whole or not _has_end(path, image.format):
                image.load()
            return _Look("", pages, alpha)
    except Image.DecompressionBombError as error:
        return _Look(f"{error} Make it smaller")
    except (OSError, ValueError, SyntaxError) as error:
        return _Look("it is empty" if path.is_file() and not path.stat().st_size else str(error))


def _bits(path: Path, image: Any) -> int:
    """Return the bits of a channel of a PNG or TIFF file, of which Pillow keeps 8 for colours; 8 for other kinds."""
    if image.format == "TIFF":
        return int(max(image.tag_v2.get(258, (8,))))
    if image.format != "PNG":
        return 8
    with path.open("rb") as file:
        return file.read(25)[24]


def _has_end(path: Path, kind: str | None) -> bool:
    """Return whether the end of a JPEG or PNG file is where it usually is; True for other kinds."""
    ends = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
    if kind not in ends:
        return True
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return ends[kind] in file.read()


def refuse_damaged(damaged: Mapping[int, str]) -> None:
    """Raise DataError if there are problems of files, by their numbers."""
    if damaged:
        count = f"{len(damaged)} image files cannot be read:\n" if len(damaged) > 1 else ""
        raise DataError(count + first_of([damaged[number] for number in sorted(damaged)]))


def first_of(problems: Sequence[str]) -> str:
    """Return the first ten problems, a line each, and the number of the others."""
    more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
    return "\n".join([*problems[:10], *more])

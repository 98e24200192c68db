"""What is wrong with image files, and what of them is not used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.image_files.decoding import Window, check_depth, deep_values, for_all, is_deep

__all__ = ["LookedAt", "first_of", "look_at_files", "refuse_damaged"]


@dataclass(frozen=True)
class LookedAt:
    """What a look at image files shows, by their numbers.

    Attributes:
        problems: why a file cannot be read.
        pages: files with several pages, of which the first is used.
        alpha: files with an alpha channel, which is not used.
        deep: lowest and highest value of the files with more than 8 bits for a channel.
    """

    problems: dict[int, str]
    pages: list[int]
    alpha: list[int]
    deep: dict[int, tuple[float, float]]


def look_at_files(paths: Sequence[Path], *, whole: bool = False, window: Window | None = None) -> LookedAt:
    """Return what is wrong with image files, and what of them is not used.

    Args:
        paths: the files.
        whole: decode each file. Else headers, and ends of JPEG and PNG files, are looked at; but once a file cannot be
            read all are decoded, so that all damaged ones are found together. Files with more than 8 bits for a channel
            are decoded in any case.
        window: the values of these that become 0 and 255, if the config says so.
    """
    looks = for_all(len(paths), lambda number: _look(paths[number], whole, window))
    problems = {
        number: f"image {paths[number]} cannot be read: {look.problem}"
        for number, look in enumerate(looks)
        if look.problem
    }
    if problems and not whole:
        return look_at_files(paths, whole=True, window=window)
    pages = [number for number, look in enumerate(looks) if look.pages]
    alpha = [number for number, look in enumerate(looks) if look.alpha]
    deep = {number: look.extremes for number, look in enumerate(looks) if look.extremes}
    return LookedAt(problems, pages, alpha, deep)


class _Look(NamedTuple):
    """Why a file cannot be read, "" if it looks sound; whether it has several pages, and alpha; the range if deep."""

    problem: str
    pages: bool = False
    alpha: bool = False
    extremes: tuple[float, float] | None = None


def _look(path: Path, whole: bool, window: Window | None) -> _Look:
    from PIL import Image

    try:
        with Image.open(path) as image:
            check_depth(image, window)
            pages = getattr(image, "is_animated", False) and image.format != "MPO"  # of a phone: a small copy
            alpha = image.has_transparency_data
            if is_deep(image):
                values = deep_values(str(path), image)
                return _Look("", pages, alpha, (float(values.min()), float(values.max())))
            if whole or not _has_end(path, image.format):
                image.load()
            return _Look("", pages, alpha)
    except Image.DecompressionBombError as error:
        return _Look(f"{error} Make it smaller")
    except (OSError, ValueError, SyntaxError, RuntimeError) as error:
        return _Look("it is empty" if path.is_file() and not path.stat().st_size else str(error))


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

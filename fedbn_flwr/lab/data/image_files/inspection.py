"""What is wrong with image files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.image_files.decoding import check_mode, for_all

__all__ = ["look_at_files", "refuse_damaged"]


def look_at_files(paths: Sequence[Path], *, whole: bool = False) -> dict[int, str]:
    """Return why image files cannot be read, by their numbers.

    Args:
        paths: the files.
        whole: decode each file. Else headers, and ends of JPEG and PNG files, are looked at; but once a file cannot be
            read all are decoded, so that all damaged ones are found together.
    """
    looks = for_all(len(paths), lambda number: _look(paths[number], whole))
    problems = {
        number: f"image {paths[number]} cannot be read: {problem}" for number, problem in enumerate(looks) if problem
    }
    if problems and not whole:
        return look_at_files(paths, whole=True)
    return problems


def _look(path: Path, whole: bool) -> str:
    """Return why a file cannot be read, "" if it looks sound."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            check_mode(image)
            if whole or not _has_end(path, image.format):
                image.load()
            return ""
    except Image.DecompressionBombError as error:
        return f"{error} Make it smaller"
    except (OSError, ValueError, SyntaxError, RuntimeError) as error:
        return "it is empty" if path.is_file() and not path.stat().st_size else str(error)


def _has_end(path: Path, kind: str | None) -> bool:
    """Return whether the end of a JPEG or PNG file is where it usually is; True for other kinds."""
    ends = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
    if kind not in ends:
        return True
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return ends[kind] in file.read()


def refuse_damaged(damaged: Mapping[int, str]) -> None:
    """Raise DataError with the first ten problems, a line each, if there are problems of files, by their numbers."""
    if damaged:
        problems = [damaged[number] for number in sorted(damaged)]
        count = f"{len(problems)} image files cannot be read:\n" if len(problems) > 1 else ""
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise DataError(count + "\n".join([*problems[:10], *more]))

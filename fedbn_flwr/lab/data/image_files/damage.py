"""Detection of damaged image files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.image_files.decoding import check_mode, for_all

# the last bytes of a complete file of each format; a file that was cut off lacks them
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}


def refuse_damaged_files(paths: Sequence[Path]) -> None:
    """Raise DataError if a header, or the end of a JPEG or PNG file, looks damaged."""
    looks = for_all(len(paths), lambda number: _look(paths[number]))
    refuse_damaged({number: problem for number, problem in enumerate(looks) if problem})


def _look(path: Path) -> str:
    """Return the reason why a file cannot be read, or "" if it looks sound."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            check_mode(image)
            # Decode the whole file if it ends in other bytes: it may be cut off, or
            # have more bytes after the image.
            if image.format in _ENDS and _ENDS[image.format] not in _end(path):
                image.load()
    except (
        OSError,
        ValueError,
        SyntaxError,
        RuntimeError,
        Image.DecompressionBombError,
    ) as error:
        return f"image {path} cannot be read: {error}"
    return ""


def _end(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read()


def refuse_damaged(damaged: Mapping[int, str]) -> None:
    """Raise DataError with the first ten problems, if there are problems.

    Args:
        damaged: the problem of each damaged file, by the file's number. The message
            has the order of the numbers.
    """
    if damaged:
        problems = [damaged[number] for number in sorted(damaged)]
        raise DataError(
            "\n".join(
                [
                    f"{len(problems)} image files cannot be read. Repair or remove them:",
                    *problems[:10],
                ]
            )
        )

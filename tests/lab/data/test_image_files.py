"""Image files on the disk have the same bits as in memory."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data import Augment, Subset
from fedbn_flwr.lab.data.forms.image_files import (
    open_images,
    pixels,
    refuse_damaged_files,
)
from fedbn_flwr.lab.data.samples import Samples, Shape

COUNT = 11


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    found = []
    for at in range(COUNT):
        height, width = 20 + at, 40 - at
        path = folder / f"{at:02}.{'png' if at % 2 else 'jpg'}"
        Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8)).save(
            path
        )
        found.append((path, at % 3))
    return found


def read(files: list[tuple[Path, int]]) -> Samples:
    return open_images(files, [], Shape(3, 16, 16)).train


def batches(samples: Samples, augment: Augment | None) -> list[torch.Tensor]:
    """Return two passes over a part of the images, in batches of unequal size."""
    subset = Subset(
        samples, np.arange(1, COUNT), mean=(0.5,) * 3, std=(0.2,) * 3, augment=augment
    )
    positions: list[torch.Tensor] = []
    for seed, size in ((0, 1), (1, 4)):
        generator = torch.Generator().manual_seed(seed)
        positions += torch.split(torch.randperm(COUNT - 1, generator=generator), size)
    found = list(subset.batches(positions, torch.Generator().manual_seed(3)))
    assert all(
        torch.equal(y, subset.targets[p])
        for (_, y), p in zip(found, positions, strict=True)
    )
    return [inputs for inputs, _ in found]


@pytest.mark.parametrize(
    "augment",
    [None, Augment.parse("crop2,flip")],
    ids=["as they are", "of the batch"],
)
def test_batches_from_the_disk_are_those_from_memory(
    files, monkeypatch: pytest.MonkeyPatch, augment: Augment | None
) -> None:
    kept = read(files)
    monkeypatch.setattr("fedbn_flwr.lab.data.forms.image_files.MAX_BYTES", 0)
    left = read(files)
    assert (kept.in_memory, left.in_memory) == (True, False)
    found = zip(batches(left, augment), batches(kept, augment), strict=True)
    assert all(torch.equal(a, b) for a, b in found)


@pytest.mark.parametrize("limit", [2**20, 0])
def test_all_damaged_files_are_named(
    files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("fedbn_flwr.lab.data.forms.image_files.MAX_BYTES", limit)
    whole = files[0][0].read_bytes()
    bad = [(tmp_path / name, 0) for name in ("cut.jpg", "empty.png", "text.png")]
    for (path, _), content in zip(
        bad, (whole[: len(whole) // 2], b"", b"no image"), strict=True
    ):
        path.write_bytes(content)
    with pytest.raises(
        DataError,
        match=r"3 image files cannot be read. Repair or remove them:\n.*cut.jpg.*\n.*empty.png.*\n.*text.png",
    ):
        read([*files, *bad])


def _picture(depth: int, colour: int) -> bytes:
    """Return a PNG file of one pixel."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        ends = (
            struct.pack(">I", len(content)),
            struct.pack(">I", zlib.crc32(kind + content)),
        )
        return ends[0] + kind + content + ends[1]

    pixel = bytes(1 + depth // 8 * {0: 1, 2: 3}[colour])
    header = struct.pack(">IIBBBBB", 1, 1, depth, colour, 0, 0, 0)
    header, data = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(pixel))
    return b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", ["tiff", "gif", "png", "webp"])
def test_a_file_with_several_pages_is_refused(tmp_path: Path, form: str) -> None:
    """The first page must not represent all pages.

    The JPEG of a telephone has a second picture.
    """
    draw = np.random.default_rng(0)
    shots = [
        Image.fromarray(draw.integers(0, 256, (8, 8, 3)).astype(np.uint8))
        for _ in range(3)
    ]
    path, of_telephone = tmp_path / f"stack.{form}", tmp_path / "shot.jpg"
    shots[0].save(path, save_all=True, append_images=shots[1:])
    shots[0].save(of_telephone, format="MPO", save_all=True, append_images=shots[1:])
    with pytest.raises(DataError, match="3 pages"):
        pixels(path)
    with pytest.raises(DataError, match="1 image files"):
        refuse_damaged_files([path, of_telephone])
    assert pixels(of_telephone).shape == (3, 8, 8)


def test_damage_of_every_kind_and_channels_of_16_bits_are_found(tmp_path: Path) -> None:
    """Pillow silently cuts colours of 16 bits down to 8."""
    sound = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (20, 20, 3)).astype(np.uint8)
    )
    names = "cut.bmp cut.tif cut.webp inside.png 16.png grey.png 8.png"
    paths = [tmp_path / name for name in names.split()]
    for path in paths[:4]:
        sound.save(path)
        whole = path.read_bytes()
        end = whole[-len(whole) // 3 :] if path.suffix == ".png" else b""
        path.write_bytes(whole[: len(whole) // 2] + end)
    for path, form in zip(paths[4:], ((16, 2), (16, 0), (8, 2)), strict=True):
        path.write_bytes(_picture(*form))
    for path in paths[:6]:
        with pytest.raises(DataError, match="cannot be read"):
            pixels(path)
    with pytest.raises(
        DataError,
        match=(
            r"(?s)3 image files.*cut.webp.*16.png.*not bytes.*module:function.*grey.png"
        ),
    ):
        refuse_damaged_files(paths)

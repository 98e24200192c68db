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
def files(tmp_path_factory) -> list[tuple[Path, int]]:
    folder = tmp_path_factory.mktemp("images")
    found = []
    for at in range(COUNT):
        path = folder / f"{at:02}.{'png' if at % 2 else 'jpg'}"
        noise(at, 20 + at, 40 - at).save(path)
        found.append((path, at % 3))
    return found


def noise(seed: int, height: int, width: int) -> Image.Image:
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))


def read(files: list[tuple[Path, int]]) -> Samples:
    return open_images(files, [], Shape(3, 16, 16)).train


def batches(samples: Samples, augment: Augment | None) -> list[torch.Tensor]:
    """Return two passes over a part of the images, in batches of unequal size."""
    subset = Subset(
        samples, np.arange(1, COUNT), mean=(0.5,) * 3, std=(0.2,) * 3, augment=augment
    )
    generator = torch.Generator().manual_seed(3)
    positions = []
    for size in (1, 4):
        positions += torch.randperm(COUNT - 1, generator=generator).split(size)
    found = [*subset.batches(positions, generator)]
    targets = torch.cat([targets for _, targets in found])
    assert torch.equal(targets, subset.targets[torch.cat(positions)])
    return [inputs for inputs, _ in found]


@pytest.mark.parametrize(
    "augment",
    [None, Augment.parse("crop2,flip")],
    ids=["as they are", "of the batch"],
)
def test_batches_from_the_disk_are_those_from_memory(
    files, monkeypatch, augment: Augment | None
) -> None:
    kept = read(files)
    monkeypatch.setattr("fedbn_flwr.lab.data.forms.image_files.MAX_BYTES", 0)
    left = read(files)
    assert (kept.in_memory, left.in_memory) == (True, False)
    found = zip(batches(left, augment), batches(kept, augment), strict=True)
    assert all(torch.equal(a, b) for a, b in found)


@pytest.mark.parametrize("limit", [2**20, 0])
def test_all_damaged_files_are_named(files, tmp_path, monkeypatch, limit: int) -> None:
    monkeypatch.setattr("fedbn_flwr.lab.data.forms.image_files.MAX_BYTES", limit)
    whole = files[0][0].read_bytes()
    cut = whole[: len(whole) // 2]
    bad = []
    contents = {"cut.jpg": cut, "empty.png": b"", "text.png": b"no image"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        bad.append((tmp_path / name, 0))
    with pytest.raises(
        DataError,
        match=r"3 image files cannot be read. Repair or remove them:\n.*cut.jpg.*\n.*empty.png.*\n.*text.png",
    ):
        read([*files, *bad])


def _picture(depth: int, colour: int) -> bytes:
    """Return a PNG file of one pixel."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        ends = struct.pack(">II", len(content), zlib.crc32(kind + content))
        return ends[:4] + kind + content + ends[4:]

    pixel = bytes(1 + depth // 8 * {0: 1, 2: 3}[colour])
    header = struct.pack(">IIBBBBB", 1, 1, depth, colour, 0, 0, 0)
    header, data = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(pixel))
    return b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", ["tiff", "gif", "png", "webp"])
def test_a_file_with_several_pages_is_refused(tmp_path, form: str) -> None:
    """The first page must not represent all pages.

    The JPEG of a telephone has a second picture.
    """
    first, *others = (noise(seed, 8, 8) for seed in range(3))
    path, of_telephone = tmp_path / f"stack.{form}", tmp_path / "shot.jpg"
    first.save(path, save_all=True, append_images=others)
    first.save(of_telephone, format="MPO", save_all=True, append_images=others)
    with pytest.raises(DataError, match="3 pages"):
        pixels(path)
    with pytest.raises(DataError, match="1 image files"):
        refuse_damaged_files([path, of_telephone])
    assert pixels(of_telephone).shape == (3, 8, 8)


def test_damage_of_every_kind_and_channels_of_16_bits_are_found(tmp_path) -> None:
    """Pillow silently cuts colours of 16 bits down to 8."""
    sound = noise(0, 20, 20)
    names = "cut.bmp cut.tif cut.webp inside.png 32.tif 16.png grey.png 8.png"
    paths = [tmp_path / name for name in names.split()]
    for path in paths[:4]:
        sound.save(path)
        whole = path.read_bytes()
        end = whole[-len(whole) // 3 :] if path.suffix == ".png" else b""
        path.write_bytes(whole[: len(whole) // 2] + end)
    Image.fromarray(np.full((4, 6), 0.5, np.float32)).save(paths[4])
    for path, form in zip(paths[5:], ((16, 2), (16, 0), (8, 2)), strict=True):
        path.write_bytes(_picture(*form))
    for path in paths[:7]:
        with pytest.raises(DataError, match="cannot be read"):
            pixels(path)
    with pytest.raises(
        DataError,
        match=(
            r"(?s)4 image files.*cut.webp.*32.tif.*mode F.*8 bits.*module:function"
            r".*16.png.*not bytes.*grey.png.*mode I;16.*8 bits.*module:function"
        ),
    ):
        refuse_damaged_files(paths)

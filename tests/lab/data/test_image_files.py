"""Image files on the disk: the same bits as in memory."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data import Augment, OwnData, Subset, load_dataset, own_info
from fedbn_flwr.lab.data.folders import hold_files
from fedbn_flwr.lab.data.image_files import look_at_files
from fedbn_flwr.lab.data.image_files.decoding import pixels
from fedbn_flwr.lab.data.samples import Samples
from fedbn_flwr.lab.data.shapes import Shape

COUNT = 11


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    found = []
    for at in range(COUNT):
        height, width = 20 + at, 40 - at
        path = folder / f"{at:02}.{'png' if at % 2 else 'jpg'}"
        Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8)).save(path)
        found.append((path, at % 3))
    return found


@pytest.fixture
def on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No image is kept in memory."""
    monkeypatch.setattr("fedbn_flwr.lab.data.image_files.MAX_BYTES", 0)


def read(files: list[tuple[Path, int]], augment: Augment | None = None) -> Samples:
    originals = bool(augment and "resized-crop" in augment.each)
    (samples,) = hold_files([files], Shape(3, 16, 16, originals))
    return samples


def batches(samples: Samples, augment: Augment | None) -> list[torch.Tensor]:
    """Two passes over a part of the images, in batches of unequal size."""
    subset = Subset(samples, np.arange(1, COUNT), mean=(0.5,) * 3, std=(0.2,) * 3, augment=augment)
    orders = [torch.randperm(COUNT - 1, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    positions = [part for order, size in zip(orders, (1, 4), strict=True) for part in torch.split(order, size)]
    found = list(subset.batches(positions, torch.Generator().manual_seed(3)))
    assert all(torch.equal(y, subset.targets[p]) for (_, y), p in zip(found, positions, strict=True))
    return [inputs for inputs, _ in found]


@pytest.mark.parametrize("text", ["", "crop2,flip", "flip,color-jitter"])
def test_batches_from_the_disk_are_those_from_memory(files, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    augment = Augment.parse(text)
    kept = read(files, augment)
    monkeypatch.setattr("fedbn_flwr.lab.data.image_files.MAX_BYTES", 0)
    left = read(files, augment)
    assert (kept.in_memory, left.in_memory) == (True, False)
    found = zip(batches(left, augment), batches(kept, augment), strict=True)
    assert all(torch.equal(a, b) for a, b in found)


@pytest.mark.parametrize("text", ["resized-crop,flip,crop1", "trivial-augment,resized-crop"])
def test_batches_of_the_images_as_stored_repeat(files, text: str) -> None:
    augment = Augment.parse(text)
    samples = read(files, augment)
    assert not samples.in_memory
    assert all(torch.equal(a, b) for a, b in zip(*(batches(samples, augment) for _ in range(2)), strict=True))


def test_augmented_batches_are_torchvisions_and_leave_the_default_generator(files) -> None:
    augment = Augment.parse("resized-crop")
    state = torch.get_rng_state()
    samples = read(files, augment)
    draw = augment.draw(2, torch.Generator().manual_seed(5))
    found, _ = samples.take(torch.tensor([3, 0]), augment, draw)
    assert torch.equal(torch.get_rng_state(), state)
    for image, number, seed in zip(found, (3, 0), draw.seeds.tolist(), strict=True):
        torch.manual_seed(seed)
        original = torch.from_numpy(np.array(Image.open(files[number][0]))).permute(2, 0, 1)
        assert torch.equal(image, v2.RandomResizedCrop((16, 16), antialias=True)(original))


@pytest.mark.parametrize("limit", [2**20, 0])
def test_all_damaged_files_are_named(files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr("fedbn_flwr.lab.data.image_files.MAX_BYTES", limit)
    whole = files[0][0].read_bytes()
    bad = [(tmp_path / name, 0) for name in ("cut.jpg", "empty.png", "text.png")]
    for (path, _), content in zip(bad, (whole[: len(whole) // 2], b"", b"no image"), strict=True):
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"3 image files cannot be read:\n.*cut.jpg.*\n.*empty.png.*\n.*text.png"):
        read([*files, *bad])
    assert list(look_at_files([path for path, _ in [*files, *bad]]).problems) == [COUNT, COUNT + 1, COUNT + 2]


def test_a_file_that_is_damaged_later_is_named(files, tmp_path: Path, on_the_disk: None) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(files[1][0].read_bytes())
    samples = read([(path, 0)])
    path.unlink()
    with pytest.raises(DataError, match=r"a\.png cannot be read"):
        samples.take(torch.tensor([0]))


def _picture(depth: int, colour: int) -> bytes:
    """A PNG file of one pixel."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    pixel = bytes(1 + depth // 8 * {0: 1, 2: 3}[colour])
    header = struct.pack(">IIBBBBB", 1, 1, depth, colour, 0, 0, 0)
    found = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(pixel)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(found)


def test_damage_of_every_kind_and_channels_of_16_bits_are_found(tmp_path: Path) -> None:
    """Pillow cuts colours of 16 bits down to 8 without a word."""
    sound = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 20, 3)).astype(np.uint8))
    paths = [
        tmp_path / name for name in ("cut.bmp", "cut.tif", "cut.webp", "inside.png", "16.png", "grey.png", "8.png")
    ]
    for path in paths[:4]:
        sound.save(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] + (whole[-len(whole) // 3 :] if path.suffix == ".png" else b""))
    for path, form in zip(paths[4:], ((16, 2), (16, 0), (8, 2)), strict=True):
        path.write_bytes(_picture(*form))
    found = look_at_files(paths)
    assert list(found.problems) == [0, 1, 2, 3], "the header of WebP is cut, so all are decoded"
    assert found.deep == {4: (0, 0), 5: (0, 0)}
    assert not look_at_files([paths[3]]).problems, "its end is there"


def _deep_png(path: Path, values: np.ndarray) -> None:
    """Write a PNG file of 16 bits a channel; values are (H, W) grey or (H, W, 3)."""
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, 2 if values.ndim == 3 else 0, 0, 0, 0)
    found = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")):
        found += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    path.write_bytes(found)


@pytest.mark.parametrize("window", [None, (1000.0, 5095.0)])
def test_images_of_16_bits_are_brought_to_bytes(tmp_path: Path, window: tuple[float, float] | None) -> None:
    grey = np.random.default_rng(0).integers(0, 65536, (6, 5)).astype(np.uint16)
    grey[0] = [0, 999, 1000, 5095, 65535]
    colours = np.stack([grey, grey[::-1], grey[:, ::-1]], 2)
    _deep_png(tmp_path / "grey.png", grey)
    _deep_png(tmp_path / "colours.png", colours)
    Image.fromarray(grey).save(tmp_path / "grey.tif")
    Image.fromarray(grey).save(tmp_path / "packed.tif", compression="tiff_lzw")
    low, high = window or (0, 65535)
    for name, values in (("grey.png", grey), ("grey.tif", grey), ("packed.tif", grey), ("colours.png", colours)):
        expected = np.rint(255 * (values.astype(np.float64) - low) / (high - low)).clip(0, 255)
        found = pixels(str(tmp_path / name), window=window)
        assert np.array_equal(found.permute(1, 2, 0).numpy(), np.broadcast_to(np.atleast_3d(expected), (6, 5, 3))), name
        assert look_at_files([tmp_path / name]).deep == {0: (0, 65535)}


def test_numbers_of_32_bits_need_a_range(tmp_path: Path) -> None:
    values = np.linspace(-1000, 1000, 12, dtype=np.float32).reshape(3, 4)
    Image.fromarray(values).save(tmp_path / "f.tif")
    assert "intensity-range=LOW,HIGH" in look_at_files([tmp_path / "f.tif"]).problems[0]
    assert look_at_files([tmp_path / "f.tif"], window=(-1000, 1000)).deep == {0: (-1000, 1000)}
    found = pixels(str(tmp_path / "f.tif"), window=(-1000, 1000))[0].flatten().tolist()
    assert found == np.rint(np.linspace(0, 255, 12)).tolist()


def test_the_range_of_deep_images_is_told(tmp_path: Path) -> None:
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        for at in range(3):
            _deep_png(tmp_path / kind / f"{at}.png", np.full((4, 4), 4095 - at, np.uint16))
    (warning,) = own_info(OwnData("folder", str(tmp_path))).warnings
    assert warning.endswith("set intensity-range=4093,4095")
    info = own_info(OwnData("folder", str(tmp_path), intensity_range="0,4095"))
    assert info.warnings == ()
    assert "6 of 6 images have more than 8 bits, values 4093 to 4095: 0 becomes 0 and 4095 becomes 255" in info.notes[0]
    assert int(load_dataset(info).train.inputs.max()) == 255
    for text in ("5", "5,5", "a,b", "1,2,3"):
        with pytest.raises(ConfigError, match=r"intensity-range='.*' must be two numbers"):
            own_info(OwnData("folder", str(tmp_path), intensity_range=text))


def test_pages_and_alpha_that_are_not_used_are_told(tmp_path: Path) -> None:
    image = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
    image.save(tmp_path / "pages.tif", save_all=True, append_images=[image])
    image.convert("RGBA").save(tmp_path / "alpha.png")
    image.save(tmp_path / "plain.png")
    found = look_at_files([tmp_path / name for name in ("plain.png", "pages.tif", "alpha.png")])
    assert (found.problems, found.pages, found.alpha) == ({}, [1], [2])

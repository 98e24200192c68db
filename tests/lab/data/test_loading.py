"""Data sets are embedded or read in place, and an absent file has a message."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data import loading
from fedbn_flwr.lab.data.datasets import DATASETS
from fedbn_flwr.lab.data.loading import load_dataset
from fedbn_flwr.lab.data.samples import Dataset, Shape, in_shape, per_channel
from tests.support.checkout import ROOT

SHARED = ROOT.parent / "shared/data"


@pytest.fixture(autouse=True)
def no_download(monkeypatch) -> Iterator[None]:
    """Keep tests off the network, and their data sets out of the cache."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    yield
    loading._load.cache_clear()


def assert_constants_hold(data: Dataset) -> None:
    """Compare with the mean and the population deviation of each channel."""
    std, mean = torch.std_mean(data.train.inputs.float(), (0, 2, 3), correction=0)
    assert (mean / 255).tolist() == pytest.approx(data.mean, abs=0.6e-4)
    assert (std / 255).tolist() == pytest.approx(data.std, abs=0.6e-4)


def test_digits_are_those_of_sklearn_with_one_fixed_split_by_class() -> None:
    from sklearn.datasets import load_digits

    data = load_dataset("digits")
    bunch = load_digits()
    assert data.train.inputs.shape == (1438, 1, 8, 8)
    assert data.test.inputs.shape == (359, 1, 8, 8)
    classes = np.rint(0.2 * np.bincount(bunch.target))
    assert torch.bincount(data.test.targets).tolist() == classes.tolist()
    rows = [
        torch.column_stack([part.targets, part.inputs.flatten(1)])
        for part in (data.train, data.test)
    ]
    expected = np.column_stack([bunch.target, np.rint(bunch.data * 255 / 16)])
    assert sorted(torch.cat(rows).tolist()) == sorted(expected.tolist())
    for own in (data, load_dataset("digits-domains")):
        assert_constants_hold(own)


@pytest.mark.parametrize(
    ("name", "folder", "counts"),
    [
        ("mnist", "MNIST", (60_000, 10_000)),
        ("studies.data:office_caltech10", "office_caltech10", (2042, 491)),
        pytest.param(
            *("fashion-mnist", "FashionMNIST", (60_000, 10_000)), marks=pytest.mark.slow
        ),
    ],
)
def test_real_files_have_the_constants(
    name: str, folder: str, counts: tuple[int, int]
) -> None:
    if not (SHARED / folder).is_dir():
        pytest.skip(f"real data {folder} is absent")
    data = load_dataset(name, SHARED)
    assert (len(data.train), len(data.test)) == counts
    assert_constants_hold(data)


def write_mnist(root: Path, suffix: str = ".gz") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 30), ("t10k", 7)):
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        arrays[f"{part}-images-idx3-ubyte"] = images
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, count, np.uint8)
    raw = root / "MNIST/raw"
    raw.mkdir(parents=True)
    for stem, array in arrays.items():
        sizes = struct.pack(f">{array.ndim}i", *array.shape)
        content = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
        packed = gzip.compress(content) if suffix else content
        (raw / f"{stem}{suffix}").write_bytes(packed)
    return arrays


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_in_place_and_once(tmp_path, suffix: str) -> None:
    """One copy serves every spelling of the arguments."""
    arrays = write_mnist(tmp_path, suffix)
    before = sorted(tmp_path.rglob("*"))
    data = load_dataset("mnist", str(tmp_path))
    for name, samples in (("train", data.train), ("t10k", data.test)):
        images = arrays[f"{name}-images-idx3-ubyte"]
        assert np.array_equal(samples.inputs[:, 0], images)
        assert samples.targets.tolist() == [*arrays[f"{name}-labels-idx1-ubyte"]]
    assert sorted(tmp_path.rglob("*")) == before
    elsewhere = f"{tmp_path}/../{tmp_path.name}"
    assert load_dataset("mnist", elsewhere, channels=1, size=28, device="cpu") is data
    assert load_dataset("mnist", tmp_path, size=14) is not data


def test_grey_is_repeated_without_a_copy_and_rgb_becomes_luma() -> None:
    grey, rgb = load_dataset("digits"), load_dataset("digits", channels=3)
    assert torch.equal(rgb.train.inputs, grey.train.inputs.expand(-1, 3, -1, -1))
    sizes = [d.train.inputs.untyped_storage().nbytes() for d in (grey, rgb)]
    assert sizes[0] == sizes[1]
    assert (rgb.mean, rgb.std) == (grey.mean * 3, grey.std * 3)
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (4, 3, 9, 9), generator=draw).byte()
    weights = torch.tensor([299, 587, 114]).view(3, 1, 1)
    luma = (images.double() * weights).sum(1, keepdim=True) / 1000
    found = in_shape(images, Shape(1, 9, 9))
    assert torch.equal(found.double(), (luma + 0.5).floor())
    assert per_channel((1.0, 2.0, 6.0), 1) == (3.0,)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [
        ("cifar", {}, ConfigError, ["'cifar10'"]),
        ("digits", {"channels": 2, "size": 8}, ConfigError, ["2 channels"]),
        ("svhn", {"data_dir": "/absent"}, DataError, ["'/absent'", "train_32x32.mat"]),
        *(
            (name, {}, DataError, [f"data set {name!r}", info.files, "set data-dir"])
            for name, info in DATASETS.items()
            if info.files
        ),
    ],
)
def test_what_cannot_be_loaded_is_named_without_a_network(
    name: str, arguments, error, words: list[str], tmp_path
) -> None:
    with pytest.raises(error) as caught:
        load_dataset(name, **{"data_dir": tmp_path, **arguments})
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


ZEROS = gzip.compress(bytes(100), mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gzip.compress(b"\0\0\x08\x01\0\0\0\x09ab", mtime=0),
            "labels-idx1-ubyte.gz .* 2 bytes",
        ),
        (gzip.compress(b"\0\0\x08\x03\0", mtime=0), "cut short"),
        (gzip.compress(b"html", mtime=0), "68746d6c"),
        (ZEROS[:-8] + bytes(8), "CRC check failed"),
        (ZEROS[:-9], "ended before the end-of-stream"),
        (ZEROS[:10] + b"\xff" * 20, "invalid"),
        (b"plain text", "Not a gzipped file"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, content: bytes, message: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / "MNIST/raw/train-labels-idx1-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_dataset("mnist", tmp_path)

"""Data sets are embedded or read in place, and an absent file has a message."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data import loading
from fedbn_flwr.lab.data.datasets import DATASETS, DatasetInfo
from fedbn_flwr.lab.data.loading import load_dataset
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.samples import Dataset, Samples, Shape, in_shape

SHARED = Path(__file__).parents[3].parent / "shared/data"


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep tests off the network, and their data sets out of the cache."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    yield
    loading._load.cache_clear()


def real(folder: str) -> Path:
    if not (SHARED / folder).is_dir():
        pytest.skip(f"real data {folder} is absent")
    return SHARED


def assert_constants_hold(data: Dataset) -> None:
    """Compare with the mean and the population deviation of each channel."""
    std, mean = torch.std_mean(data.train.inputs.float(), (0, 2, 3), correction=0)
    assert (mean / 255).tolist() == pytest.approx(data.mean, abs=0.6e-4)
    assert (std / 255).tolist() == pytest.approx(data.std, abs=0.6e-4)


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(root: Path, suffix: str = ".gz") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    raw = root / "MNIST" / "raw"
    arrays = {
        "train-images-idx3-ubyte": rng.integers(0, 256, (30, 28, 28)),
        "train-labels-idx1-ubyte": rng.integers(0, 10, 30),
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (7, 28, 28)),
        "t10k-labels-idx1-ubyte": rng.integers(0, 10, 7),
    }
    for stem, array in arrays.items():
        write_idx(raw / f"{stem}{suffix}", array)
    return arrays


def test_digits_are_those_of_sklearn_with_one_fixed_split_by_class() -> None:
    from sklearn.datasets import load_digits

    data = load_dataset("digits")
    bunch = load_digits()
    assert data.train.inputs.shape == (1438, 1, 8, 8)
    assert data.test.inputs.shape == (359, 1, 8, 8)
    classes = np.bincount(bunch.target)
    assert torch.bincount(data.test.targets).tolist() == [
        round(0.2 * n) for n in classes
    ]
    everything = torch.cat([data.train.inputs, data.test.inputs]).flatten(1)
    original = torch.from_numpy(bunch.images).flatten(1)
    key = sorted(
        zip(
            everything.tolist(),
            torch.cat([data.train.targets, data.test.targets]).tolist(),
            strict=True,
        )
    )
    expected = (original * 255 / 16).round().to(torch.uint8)
    assert key == sorted(zip(expected.tolist(), bunch.target.tolist(), strict=True))
    for own in (data, load_dataset("digits-domains")):
        assert_constants_hold(own)


def test_one_copy_per_process_for_every_spelling_of_the_arguments(
    tmp_path: Path,
) -> None:
    write_mnist(tmp_path)
    first = load_dataset("mnist", tmp_path)
    same = load_dataset(
        name="mnist",
        data_dir=f"{tmp_path}/../{tmp_path.name}",
        channels=1,
        size=28,
        device="cpu",
    )
    assert same is first
    assert load_dataset("digits", data_dir="/does/not/matter") is load_dataset("digits")
    assert load_dataset("mnist", tmp_path, size=14) is not first


def test_threads_that_load_at_the_same_time_load_once() -> None:
    found: list[Dataset] = []
    barrier = threading.Barrier(4)

    def load() -> None:
        barrier.wait()
        found.append(load_dataset("digits"))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(data) for data in found}) == 1


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_in_place_packed_or_not(tmp_path: Path, suffix: str) -> None:
    arrays = write_mnist(tmp_path, suffix)
    before = sorted(tmp_path.rglob("*"))
    data = load_dataset("mnist", str(tmp_path))
    assert torch.equal(
        data.train.inputs[:, 0],
        torch.from_numpy(arrays["train-images-idx3-ubyte"]).to(torch.uint8),
    )
    assert data.train.targets.tolist() == arrays["train-labels-idx1-ubyte"].tolist()
    assert data.test.targets.tolist() == arrays["t10k-labels-idx1-ubyte"].tolist()
    assert data.test.inputs.shape == (7, 1, 28, 28)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "folder", "counts"),
    [
        ("mnist", "MNIST", (60_000, 10_000)),
        ("office-caltech10", "office_caltech10", (2042, 491)),
        pytest.param(
            *("fashion-mnist", "FashionMNIST", (60_000, 10_000)), marks=pytest.mark.slow
        ),
    ],
)
def test_real_files_have_the_constants(
    name: str, folder: str, counts: tuple[int, int]
) -> None:
    data = load_dataset(name, real(folder))
    assert (len(data.train), len(data.test)) == counts
    assert_constants_hold(data)


@pytest.mark.slow
def test_real_cifar10_files(tmp_path: Path) -> None:
    folder = real("cifar10_compact") / "cifar10_compact"
    spec = importlib.util.spec_from_file_location(
        "unpack_cifar10", folder / "unpack_cifar10.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.unpack(str(tmp_path))
    data = load_dataset("cifar10", tmp_path)
    images, labels = module.batch("data_batch_3")[:2]
    assert data.train.inputs.shape == (50_000, 3, 32, 32)
    assert len(data.test) == 10_000
    assert torch.equal(
        data.train.inputs[20_000:30_000], torch.from_numpy(images).permute(0, 3, 1, 2)
    )
    assert data.train.targets[20_000:30_000].tolist() == labels.tolist()
    assert_constants_hold(data)


def test_usps_and_its_constants(tmp_path: Path) -> None:
    archive = np.load(real("usps") / "usps/usps.npz")
    for name, part in (("usps.bz2", "train"), ("usps.t.bz2", "test")):
        # The values are increased by 1e-6 of the range, so that torchvision's
        # truncation to bytes restores the original values.
        values = (
            archive[f"x_{part}"].reshape(-1, 256).astype(float) + 1e-3
        ) / 255 * 2 - 1
        # libsvm's text: the label from 1 on, and "INDEX:VALUE" of each pixel
        lines = []
        labels = archive[f"y_{part}"][:300].tolist()
        for label, row in zip(labels, values[:300].tolist(), strict=True):
            pixels = [f"{i}:{value:.6f}" for i, value in enumerate(row, 1)]
            lines.append(f"{label + 1} {' '.join(pixels)}")
        (tmp_path / name).write_bytes(bz2.compress("\n".join(lines).encode(), 1))
    data = load_dataset("usps", tmp_path)
    assert torch.equal(
        data.train.inputs[:, 0], torch.from_numpy(archive["x_train"][:300])
    )
    assert data.test.targets.tolist() == archive["y_test"][:300].tolist()
    whole = Samples(
        torch.from_numpy(archive["x_train"])[:, None],
        torch.from_numpy(archive["y_train"]).long(),
    )
    assert_constants_hold(Dataset("usps", whole, whole, 10, data.mean, data.std))


def test_svhn_in_its_published_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import scipy.io
    from torchvision.datasets import SVHN

    monkeypatch.setattr(SVHN, "_check_integrity", lambda self: True)
    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5)).astype(np.uint8)
    for name in ("train_32x32.mat", "test_32x32.mat"):
        scipy.io.savemat(
            tmp_path / name, {"X": images, "y": np.array([[10], [1], [2], [9], [10]])}
        )
    data = load_dataset("svhn", tmp_path)
    assert torch.equal(
        data.train.inputs, torch.from_numpy(images.transpose(3, 2, 0, 1).copy())
    )
    assert data.train.targets.tolist() == [0, 1, 2, 9, 0]


def test_grey_is_repeated_without_a_copy_and_constants_with_it() -> None:
    grey, rgb = load_dataset("digits"), load_dataset("digits", channels=3)
    assert rgb.train.inputs.shape == (1438, 3, 8, 8)
    assert all(
        torch.equal(rgb.train.inputs[:, c], grey.train.inputs[:, 0]) for c in range(3)
    )
    assert (
        rgb.train.inputs.untyped_storage().nbytes()
        == grey.train.inputs.untyped_storage().nbytes()
    )
    assert rgb.mean == grey.mean * 3
    assert rgb.std == grey.std * 3


def test_rgb_becomes_luma_and_constants_averages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = torch.randint(
        0, 256, (4, 3, 32, 32), generator=torch.Generator().manual_seed(0)
    ).to(torch.uint8)
    samples = Samples(inputs, torch.arange(4))
    info = DATASETS["svhn"]
    fields = {field: getattr(info, field) for field in info.__slots__} | {
        "files": "",
        "loader": lambda *_: Loaded(samples, samples),
    }
    monkeypatch.setitem(DATASETS, "svhn", DatasetInfo(**fields))
    data = load_dataset("svhn", channels=1)
    luma = (inputs.double() * torch.tensor([299, 587, 114]).view(3, 1, 1)).sum(
        1, keepdim=True
    ) / 1000
    assert torch.equal(data.train.inputs.double(), (luma + 0.5).floor())
    assert data.mean == (pytest.approx(sum(info.mean) / 3),)
    assert data.std == (pytest.approx(sum(info.std) / 3),)


def test_chunks_do_not_change_the_result_and_the_right_shape_stays_as_it_is() -> None:
    images = load_dataset("digits").test.inputs
    smaller = Shape(1, 5, 4)
    assert torch.equal(in_shape(images, smaller, chunk=7), in_shape(images, smaller))
    kept = in_shape(images, Shape(1, 8, 8))
    assert (kept.data_ptr(), kept.stride()) == (images.data_ptr(), images.stride())


@pytest.mark.parametrize(
    ("arguments", "error", "fact"),
    [
        ({"name": "cifar"}, ConfigError, "'cifar10'"),
        ({"name": "digits", "channels": 2, "size": 8}, ConfigError, "2 channels"),
        ({"name": "digits", "channels": 0, "size": 8}, ConfigError, "0 channels"),
        (
            {"name": "svhn", "data_dir": "/absent"},
            DataError,
            "'svhn'.*'/absent'.*train_32x32.mat",
        ),
    ],
)
def test_what_cannot_be_loaded_is_named(
    arguments: dict[str, object], error: type[Exception], fact: str
) -> None:
    with pytest.raises(error, match=fact):
        load_dataset(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [name for name, info in DATASETS.items() if info.files]
)
def test_absent_files_without_a_network_are_explained(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset(name, tmp_path)
    message = str(caught.value)
    assert f"data set {name!r}" in message
    assert str(tmp_path) in message
    assert DATASETS[name].files in message
    assert "\n" not in message
    assert "set data-dir" in message


def test_torchvision_is_asked_to_download_what_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader of torchvision downloads the files.

    Here its fetcher copies four local files.
    """
    source, target = tmp_path / "source", tmp_path / "target"
    arrays = write_mnist(source)
    target.mkdir()

    def fetch(url: str, download_root: Path, filename: str, md5: str) -> None:
        packed = (source / "MNIST/raw" / filename).read_bytes()
        (Path(download_root) / filename.removesuffix(".gz")).write_bytes(
            gzip.decompress(packed)
        )

    monkeypatch.setattr(
        "torchvision.datasets.mnist.download_and_extract_archive", fetch
    )
    data = load_dataset("mnist", target)
    assert data.train.targets.tolist() == arrays["train-labels-idx1-ubyte"].tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x09ab"),
            "labels-idx1-ubyte.gz .* 2 bytes",
        ),
        (gzip.compress(b"\x00\x00\x08\x03\x00"), "cut short"),
        (gzip.compress(b"html"), "68746d6c"),
        (gzip.compress(bytes(100))[:-8] + bytes(8), "CRC check failed"),
        (gzip.compress(bytes(100))[:-9], "ended before the end-of-stream"),
        (gzip.compress(bytes(100))[:10] + b"\xff" * 20, "invalid"),
        (b"plain text", "Not a gzipped file"),
    ],
    ids=[
        "short data",
        "short header",
        "another format",
        "bad checksum",
        "short gzip",
        "bad gzip",
        "no gzip",
    ],
)
def test_damaged_idx_files_are_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    write_mnist(tmp_path)
    (tmp_path / "MNIST/raw/train-labels-idx1-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_dataset("mnist", tmp_path)

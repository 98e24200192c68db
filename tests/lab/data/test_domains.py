"""Data sets of several domains.

They are npz files, folders of images, digits of five kinds, and the embedded five.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.datasets import SVHN

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data import loading
from fedbn_flwr.lab.data.loading import load_dataset
from fedbn_flwr.lab.data.samples import Dataset
from studies.data import DOMAINNET10, OFFICE_CALTECH10

SPLITS = ("train", "test")
TWO_IMAGES = np.arange(32, dtype=np.uint8).reshape(2, 4, 4)


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    yield
    loading._load.cache_clear()


def write_npz(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write the images as the training set and, backwards, as the test set."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path, x_train=images, y_train=labels, x_test=images[::-1], y_test=labels[::-1]
    )


def write_folders(
    root: Path, domains: tuple[str, ...], classes: tuple[str, ...], each: int
) -> None:
    """Write grey-valued png images whose value is 40 * domain + 4 * number."""
    for d, domain in enumerate(domains):
        for name in classes:
            folder = root / domain / name
            folder.mkdir(parents=True)
            for number in range(each):
                value = 40 * d + 4 * number
                Image.new("RGB", (3, 2), (value, value, value)).save(
                    folder / f"image_{number:03}.png"
                )


def of_group(data: Dataset, name: str, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    samples = getattr(data, split)
    chosen = samples.groups == data.group_names.index(name)
    return samples.inputs[chosen], samples.targets[chosen]


ARRAYS = {
    "labels": (TWO_IMAGES, [0, 10], "0 to 10. Use labels from 0 to 9"),
    "lengths": (TWO_IMAGES, [0], "one integer for each image"),
    "floats": (TWO_IMAGES / 255, [0, 1], "float64 images"),
    "axes": (TWO_IMAGES[..., None, None], [0, 1], "H, W, 3."),
    "channels": (np.repeat(TWO_IMAGES[..., None], 2, 3), [0, 1], "Use .N, H, W"),
}
SPOILT = {
    "image": (lambda root: (root / "mug/image_001.png").write_bytes(b"x"), "image_001"),
    "domain": (lambda root: root.rename(root / "../camera"), "webcam/backpack is abse"),
    "class": (
        lambda root: [path.unlink() for path in (root / "mug").iterdir()],
        "webcam/mug has no image files",
    ),
    "npz": (
        lambda root: (root / "../amazon.npz").write_bytes(b"PK\x03\x04 cut"),
        "could not be read",
    ),
    "keys": (
        lambda root: np.savez(root / "../amazon.npz", x_train=np.zeros(2)),
        "amazon.npz .*x_test, y_test, y_train",
    ),
}


@pytest.mark.parametrize("case", [*ARRAYS, *SPOILT])
def test_a_wrong_domain_is_named(tmp_path, case: str) -> None:
    write_folders(tmp_path, *OFFICE_CALTECH10, each=5)
    if case in ARRAYS:
        images, labels, message = ARRAYS[case]
        write_npz(tmp_path / "amazon.npz", images, np.array(labels))
    else:
        spoil, message = SPOILT[case]
        spoil(tmp_path / "webcam")
    with pytest.raises(DataError, match=message) as caught:
        load_dataset("studies.data:office_caltech10", tmp_path, size=2)
    assert "download" not in str(caught.value)
    assert "office_caltech10/ with amazon" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "folder", "known"),
    [
        ("studies.data:office_caltech10", "office_caltech10", OFFICE_CALTECH10),
        ("studies.data:domainnet10", "domainnet", DOMAINNET10),
    ],
)
def test_every_fifth_file_of_a_class_is_a_test_file(
    tmp_path, name: str, folder: str, known: tuple[tuple[str, ...], ...]
) -> None:
    domains, classes = known
    write_folders(tmp_path / folder, domains, classes, each=6)
    write_folders(tmp_path / folder, domains[:1], ("another_class",), each=1)
    for root in (tmp_path, tmp_path / folder):  # above the folder, or the folder itself
        data = load_dataset(name, root, size=4)
        assert data.group_names == domains
        for d, domain in enumerate(domains):
            for split, numbers in (("train", [0, 1, 2, 3, 5]), ("test", [4])):
                inputs, targets = of_group(data, domain, split)
                assert targets.tolist() == sorted([*range(10)] * len(numbers))
                values = torch.tensor([40 * d + 4 * number for number in numbers] * 10)
                assert torch.equal(inputs, values.view(-1, 1, 1, 1).expand(-1, 3, 4, 4))


def test_digits_five_takes_the_domains_that_are_present(tmp_path, monkeypatch) -> None:
    """SVHN's 10 is the digit 0. Grey images become coloured, and are resized."""
    monkeypatch.setattr(SVHN, "_check_integrity", lambda self: True)
    draw = np.random.default_rng(0)
    rgb, grey, synth, svhn = (
        draw.integers(0, 256, shape).astype(np.uint8)
        for shape in ((5, 32, 32, 3), (7, 16, 16), (32, 32, 3, 4), (32, 32, 3, 4))
    )
    write_npz(tmp_path / "mnist_m/a_name.npz", rgb, np.arange(5))
    write_npz(tmp_path / "usps/usps.npz", grey, np.arange(7))
    for split in SPLITS:
        for prefix, images, labels in (
            ("synth_", synth, [[0], [9], [3], [10]]),
            ("", svhn, [[10], [1], [2], [9]]),
        ):
            file = tmp_path / f"{prefix}{split}_32x32.mat"
            scipy.io.savemat(file, {"X": images, "y": np.array(labels)})
    data = load_dataset("studies.data:digits_five", tmp_path)
    assert data.group_names == ("svhn", "usps", "synth-digits", "mnist-m")
    assert data.train.inputs.shape == data.test.inputs.shape == (20, 3, 28, 28)
    assert of_group(data, "usps", "test")[1].tolist() == [*range(6, -1, -1)]
    original = load_dataset("studies.data:digits_five", tmp_path, size=32)
    for name, images, labels in (
        ("mnist-m", rgb.transpose(0, 3, 1, 2), [*range(5)]),
        ("synth-digits", synth.transpose(3, 2, 0, 1), [0, 9, 3, 0]),
        ("svhn", svhn.transpose(3, 2, 0, 1), [0, 1, 2, 9]),
    ):
        inputs, targets = of_group(original, name, "train")
        assert np.array_equal(inputs.numpy(), images)
        assert targets.tolist() == labels


def test_the_published_parts_of_usps_are_pooled_and_split_anew(tmp_path) -> None:
    """The split has 80 and 20 % of 9,298 images, as FedBN's authors have it.

    Each image occurs once, with its own label, and each load gives the same split.
    """
    numbers = np.arange(9298)
    images = (numbers[:, None, None] >> np.array([[0, 8], [0, 8]])).astype(np.uint8)
    (tmp_path / "usps").mkdir()
    parts = {}
    for part, rows in (("train", slice(7291)), ("test", slice(7291, None))):
        parts |= {f"x_{part}": images[rows], f"y_{part}": numbers[rows] % 10}
    np.savez(tmp_path / "usps/usps.npz", **parts)
    data = load_dataset("studies.data:digits_five", tmp_path, size=2)
    assert (len(data.train), len(data.test)) == (7438, 1860)
    found = []
    for split in SPLITS:
        inputs, targets = of_group(data, "usps", split)
        found.append(inputs[:, 0, 0].long() @ torch.tensor([1, 256]))
        assert torch.equal(targets, found[-1] % 10)
    assert torch.cat(found).sort().values.tolist() == numbers.tolist()
    # a fifth of each published part is for testing
    assert 300 < int((found[1] >= 7291).sum()) < 500
    loading._load.cache_clear()
    again = load_dataset("studies.data:digits_five", tmp_path, size=2)
    assert torch.equal(again.test.inputs, data.test.inputs)


def test_digits_five_without_a_domain_downloads_nothing(tmp_path) -> None:
    with pytest.raises(DataError, match="mnist, svhn, usps, synth-digits, mnist-m"):
        load_dataset("studies.data:digits_five", tmp_path)
    assert list(tmp_path.iterdir()) == []
    for name in ("a", "b"):
        write_npz(tmp_path / f"usps/{name}.npz", TWO_IMAGES, np.arange(2))
    with pytest.raises(DataError, match="'usps' has 2 "):
        load_dataset("studies.data:digits_five", tmp_path)


def test_the_embedded_domains_transform_the_digits() -> None:
    """They share the test digits, and no training digit."""
    data, digits = load_dataset("digits-domains"), load_dataset("digits")
    assert data.group_names == ("inverted", "blurred", "noisy", "coloured", "rotated")
    assert torch.bincount(data.train.groups).tolist() == [288, 288, 288, 287, 287]
    plain = digits.test.inputs.double().expand(-1, 3, -1, -1)
    line = torch.tensor([1, 2, 1]).double() / 4
    blurred = F.conv2d(plain[:, :1], line.outer(line)[None, None], padding=1)
    expected = {
        "inverted": 255 - plain,
        "rotated": plain.rot90(1, (2, 3)),
        "blurred": (blurred + 0.5).floor().expand_as(plain),
    }
    for name in data.group_names:
        inputs, targets = of_group(data, name, "test")
        assert torch.equal(targets, digits.test.targets)
        if name in expected:
            assert torch.equal(inputs.double(), expected[name]), name
    # Integers and fixed seeds give the same bytes on every machine.
    parts = (part.inputs.numpy().tobytes() for part in (data.train, data.test))
    assert hashlib.sha256(b"".join(parts)).hexdigest().startswith("986404471d2faf35")
    # Undo two of the transformations, which lose nothing.
    seen = [255 - of_group(data, "inverted", "train")[0]]
    seen.append(of_group(data, "rotated", "train")[0].rot90(-1, (2, 3)))
    images = [tuple(image) for image in torch.cat(seen)[:, 0].flatten(1).tolist()]
    every = {tuple(image) for image in digits.train.inputs.flatten(1).tolist()}
    assert len({*images} & every) == len(images) == 288 + 287

"""Cityscapes: small images in the published layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.datasets import Cityscapes

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data import Augment, Subset
from fedbn_flwr.lab.data.loading import load_dataset
from fedbn_flwr.lab.data.partitioning import split_dataset

TRAIN, VAL = {"bremen": 3, "aachen": 2}, {"lindau": 1, "aachen": 1}


@pytest.fixture
def root(write_cityscapes, tmp_path: Path) -> Path:
    return write_cityscapes(tmp_path, TRAIN, VAL, (4, 8))


def test_a_group_per_city_and_19_classes_of_pixels(root: Path) -> None:
    data = load_dataset("cityscapes", root, size=4)
    assert data.group_names == ("aachen", "bremen", "lindau")
    assert data.train.groups.tolist() == [0, 0, 1, 1, 1]
    assert data.test.groups.tolist() == [0, 2]
    assert data.train.inputs.shape == (5, 3, 4, 8)
    assert data.train.targets.shape == (5, 4, 8)
    assert data.train.by_pixel
    assert data.num_classes == 19
    # torchvision's copy of the label list
    published = {c.id: c.train_id for c in Cityscapes.classes if c.id >= 0}
    for samples in (data.train, data.test):
        ids = samples.inputs[:, 0]
        for number in range(34):
            label = published[number] if 0 <= published[number] < 19 else 255
            assert (samples.targets[ids == number] == label).all()
        assert set(samples.targets.unique().tolist()) <= {*range(19), 255}
        assert (samples.targets[:, 0, 0] == 255).all()


def test_images_and_labels_are_resized_together_keeping_1_to_2(root: Path) -> None:
    full, half = (
        load_dataset("cityscapes", root, size=4),
        load_dataset("cityscapes", root, channels=1, size=8),
    )
    assert half.train.inputs.shape == (5, 1, 8, 16)
    assert torch.equal(
        half.train.targets,
        full.train.targets.repeat_interleave(2, 1).repeat_interleave(2, 2),
    )


def test_a_set_on_the_disk_gives_the_same_batches(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = load_dataset("cityscapes", root, size=2)
    monkeypatch.setattr("fedbn_flwr.lab.data.image_files.MAX_BYTES", 0)
    left = load_dataset("cityscapes", root, size=2, originals=True)
    assert (held.train.in_memory, left.train.in_memory) == (True, False)
    assert torch.equal(left.train.groups, held.train.groups)
    for augment in (None, Augment(crop=1, flip=True)):
        subsets = [
            Subset(d.train, None, mean=d.mean, std=d.std, augment=augment)
            for d in (held, left)
        ]
        a, b = (
            s.batch(torch.tensor([4, 0, 0]), torch.Generator().manual_seed(1))
            for s in subsets
        )
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


def test_a_client_per_city_and_no_split_by_class(root: Path) -> None:
    data = load_dataset("cityscapes", root, size=4)
    train, test = split_dataset(data, "natural", 2, seed=0)
    assert [part.tolist() for part in train] == [[0, 1], [2, 3, 4]]
    assert [part.tolist() for part in test] == [[0], []]
    assert sum(map(len, split_dataset(data, "iid", 2, seed=0)[0])) == 5
    for name in ("classes", "dirichlet", "shards"):
        with pytest.raises(
            ConfigError,
            match=(
                f"partition '{name}' splits by class.* Use one of iid, domain, natural"
            ),
        ):
            split_dataset(data, name, 2, seed=0)


def test_a_wrong_folder_or_label_is_named(root: Path) -> None:
    label = (
        root / "cityscapes/gtFine/train/bremen/bremen_000001_000019_gtFine_labelIds.png"
    )
    Image.new("L", (8, 3)).save(label)
    with pytest.raises(
        DataError,
        match=r"labels .*000001.* have \(8, 3\) pixels, but the image has \(8, 4\)",
    ):
        load_dataset("cityscapes", root, size=4)
    label.unlink()
    with pytest.raises(
        DataError,
        match=r"bremen_000001_000019_leftImg8bit.png has no label file .*labelIds.png",
    ):
        load_dataset("cityscapes", root, size=4)
    for path in (root / "cityscapes/leftImg8bit/val").rglob("*.png"):
        path.unlink()
    with pytest.raises(DataError, match="val/aachen has no image files"):
        load_dataset("cityscapes", root, size=4)
    with pytest.raises(DataError, match=r"folder .*leftImg8bit/train is absent"):
        load_dataset("cityscapes", root / "cityscapes/gtFine", size=4)

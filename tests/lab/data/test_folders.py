"""Folders of image files.

They cover decoding, Tiny-ImageNet and ImageNet in their layouts, and the limit on
memory.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.forms import image_files
from fedbn_flwr.lab.data.forms.folder import _image_folders
from fedbn_flwr.lab.data.loading import load_dataset
from fedbn_flwr.lab.data.samples import Shape
from studies.data import files_of_classes, images_of


def write(
    path: Path, size: tuple[int, int] = (8, 6), seed: int = 0, mode: str = "RGB"
) -> torch.Tensor:
    """Write a random image of (width, height), and return its pixels (3, H, W)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    pixels = draw.integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    written = np.array(Image.open(path).convert("RGB"))
    return torch.from_numpy(written).permute(2, 0, 1)


def test_images_of_every_mode_are_decoded_in_order(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(image_files, "_CHUNK", 3)
    modes = ["RGB", "L", "P", "RGBA", "1", "RGB", "L"]
    expected = [
        write(tmp_path / f"{at}.png", seed=at, mode=mode)
        for at, mode in enumerate(modes)
    ]
    files = [(path, at) for at, path in enumerate(images_of(tmp_path))]
    samples = image_files.open_images(files, [], Shape(3, 6, 8)).train
    assert torch.equal(samples.inputs, torch.stack(expected))
    assert samples.targets.tolist() == list(range(7))


@pytest.mark.parametrize("centre", [False, True])
def test_images_are_resized_or_cut_to_the_central_square(
    tmp_path, centre: bool
) -> None:
    image = write(tmp_path / "wide.png", size=(9, 4))
    files = [(tmp_path / "wide.png", 0)]
    samples = image_files.open_images(files, [], Shape(3, 3, 3), centre=centre).train
    seen = image[:, :, 2:6] if centre else image
    expected = F.interpolate(
        seen[None].double(), (3, 3), mode="bilinear", antialias=True
    )
    assert (samples.inputs.double() - expected).abs().max() <= 0.5 + 1e-4


def write_tiny_imagenet(root: Path) -> dict[str, torch.Tensor]:
    """Write two classes, with the validation images in a different order."""
    found = {}
    for stem in ("n02_0", "n02_1", "n01_0", "n01_1"):
        path = root / f"train/{stem[:3]}/images/{stem}.JPEG"
        found[stem] = write(path, seed=len(found))
        (root / f"train/{stem[:3]}/boxes.txt").write_text("n02_0.JPEG\t0\t0\t62\t62\n")
    lines = ""
    for number, wnid in enumerate(["n02", "n01", "n02"]):
        stem = f"val_{number}"
        found[stem] = write(root / f"val/images/{stem}.JPEG", seed=10 + number)
        lines += f"{stem}.JPEG\t{wnid}\t0\t32\t44\t62\n"
    (root / "val/val_annotations.txt").write_text(lines)
    return found


def test_tiny_imagenet_in_its_layout(tmp_path) -> None:
    found = write_tiny_imagenet(tmp_path / "tiny-imagenet-200")
    data = load_dataset("studies.data:tiny_imagenet", tmp_path, size=6)
    assert data.train.targets.tolist() == [0, 0, 1, 1]
    assert data.test.targets.tolist() == [1, 0, 1]
    assert data.num_classes == 200
    inputs = torch.cat([data.train.inputs, data.test.inputs])
    for image, stem in zip(inputs, sorted(found), strict=True):
        assert torch.equal(image, found[stem][:, :, 1:7])
    inside = tmp_path / "tiny-imagenet-200"
    grey = load_dataset("studies.data:tiny_imagenet", inside, channels=1)
    assert grey.test.inputs.shape == (3, 1, 64, 64)


def test_imagenet_in_its_layout(tmp_path) -> None:
    found = {}
    places = [*itertools.product(["train"], ["n7", "n3", "n5"], "01")]
    for place in [*places, *itertools.product(["val"], ["n7", "n3", "n5"], "0")]:
        path = tmp_path / "imagenet" / Path(*place).with_suffix(".png")
        found[place] = write(path, size=(5, 9), seed=len(found))
    data = load_dataset("studies.data:imagenet", tmp_path, size=5)
    assert data.train.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.test.targets.tolist() == [0, 1, 2]
    inputs = torch.cat([data.train.inputs, data.test.inputs])
    for image, place in zip(inputs, sorted(found), strict=True):
        assert torch.equal(image, found[place][:, 2:7])
    assert data.group_names == ()
    (tmp_path / "imagenet/val/n5").rename(tmp_path / "imagenet/val/n6")
    with pytest.raises(DataError, match=r"folder .*val/n5 is absent"):
        load_dataset("studies.data:imagenet", tmp_path, size=6)


def test_folders_that_do_not_fit_are_named(tmp_path) -> None:
    write_tiny_imagenet(tmp_path / "a")
    (tmp_path / "a/val/images/val_1.JPEG").unlink()
    write_tiny_imagenet(tmp_path / "b")
    (tmp_path / "b/val/val_annotations.txt").unlink()
    for number in range(201):
        (tmp_path / f"c/train/n{number}").mkdir(parents=True)
    for name, words in (
        ("a", r"val_1.JPEG cannot be read: .*No such file"),
        ("b", r"val_annotations.txt'.*tiny-imagenet-200/"),
        ("c", r"201 .*1 to 200"),
    ):
        with pytest.raises(DataError, match=words):
            load_dataset("studies.data:tiny_imagenet", tmp_path / name)
    with pytest.raises(DataError, match=r"n0 has no image files \(.bmp, .jpeg"):
        files_of_classes(tmp_path / "c/train", ["n0"])


@pytest.mark.parametrize(
    "links",
    [
        {"a/up": ".", "b/up": "."},
        {"a/up": "a", "a/again": "."},
        {"a/other": "b", "b/other": "a"},
    ],
)
def test_a_folder_with_links_to_folders_above_ends(
    tmp_path, links: dict[str, str]
) -> None:
    for name in "ab":
        write(tmp_path / name / "0.png")
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    folders = _image_folders(tmp_path)
    assert {f"{folder.relative_to(tmp_path)}" for folder in folders} >= {"a", "b"}
    assert len(folders) <= 4

"""Writes the files of the studies on own data.

``python docs/results/own_data.py office FOLDER OUT``: FOLDER/office_caltech10/{amazon,caltech,dslr,webcam}.npz as PNG
files, OUT/DOMAIN/{train,test}/CLASS/NUMBER.png.

``python docs/results/own_data.py collages OUT.npz [COUNT]``: COUNT collages (400) of each of the five domains of
``digits-domains`` for training and half as many for tests. A collage is four digits of 14 pixels in two rows; its
targets are ten labels, which digits are there.

``python docs/results/own_data.py digits FOLDER OUT.npz``: 743 training and 743 test images each of MNIST, USPS and
MNIST-M, 28 pixels, with the domain as the client.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedbn_flwr.lab.data import DATASETS, load_dataset
from fedbn_flwr.lab.data.domains import OFFICE_CALTECH10


def office(source: Path, out: Path) -> None:
    """Write each array of images as PNG files, which lose nothing."""
    domains, classes = OFFICE_CALTECH10
    for domain in domains:
        with np.load(source / "office_caltech10" / f"{domain}.npz") as arrays:
            for part in ("train", "test"):
                for number, (image, label) in enumerate(zip(arrays[f"x_{part}"], arrays[f"y_{part}"], strict=True)):
                    folder = out / domain / part / classes[label]
                    folder.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(image).save(folder / f"{number:04}.png")


def digits(source: Path, out: Path, count: int = 743) -> None:
    """Write x, y, client and split of one npz file, drawn with seed 0."""
    data, draw = load_dataset(DATASETS["digits-five"], data_dir=source), np.random.default_rng(0)
    found: dict[str, list[np.ndarray]] = {"x": [], "y": [], "client": [], "split": []}
    for part, samples in (("train", data.train), ("test", data.test)):
        for group, name in enumerate(data.group_names):
            chosen = np.sort(draw.permutation(np.flatnonzero(samples.groups.numpy() == group))[:count])
            found["x"].append(samples.inputs[chosen].permute(0, 2, 3, 1).numpy())
            found["y"].append(samples.targets[chosen].numpy())
            found["client"].append(np.full(count, name))
            found["split"].append(np.full(count, part))
    np.savez_compressed(out, **{name: np.concatenate(arrays) for name, arrays in found.items()})


def collages(out: Path, count: int) -> None:
    """Write x, y, client and split of one npz file."""
    data = load_dataset(DATASETS["digits-domains"], size=14)
    draw = np.random.default_rng(0)
    found: dict[str, list[np.ndarray]] = {"x": [], "y": [], "client": [], "split": []}
    for part, samples, number in (("train", data.train, count), ("test", data.test, count // 2)):
        for at, domain in enumerate(data.group_names):
            of_domain = torch.nonzero(samples.groups == at).flatten().numpy()
            chosen = draw.choice(of_domain, (number, 2, 2))
            images = samples.inputs.numpy()[chosen].transpose(0, 1, 4, 2, 5, 3).reshape(number, 28, 28, -1)
            labels = samples.targets.numpy()[chosen].reshape(number, 4)
            found["x"].append(images)
            found["y"].append((labels[:, :, None] == np.arange(10)).any(1).astype(np.uint8))
            found["client"].append(np.full(number, domain))
            found["split"].append(np.full(number, part))
    np.savez_compressed(out, **{name: np.concatenate(arrays) for name, arrays in found.items()})


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "office":
        office(*map(Path, rest))
    elif kind == "digits":
        digits(*map(Path, rest))
    else:
        collages(Path(rest[0]), int(rest[1]) if len(rest) > 1 else 400)

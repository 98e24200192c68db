"""Data sets as people have them: tensors in memory, a Hugging Face data set, images in
folders. Each client has a ``DataLoader``.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.work import Job, load_data
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import transforms


@cache
def client_loader(job: Job, client: int) -> DataLoader[Any]:
    """Return the loader of a client's training data; each process makes it once."""
    setting, data = job.work, load_data(job.data, job.work.dataset)
    inputs, targets = data.client(client, setting.examples)
    options: dict[str, Any] = {"num_workers": setting.loader_workers}
    source: Dataset[Any] = TensorDataset(inputs, targets)
    if setting.source != "tensors":
        folder = Path(job.data) / setting.dataset
        norm = json.loads((folder / "norm.json").read_text())
        steps = [transforms.ToTensor(), transforms.Normalize(**norm)]
        own = slice(client * setting.examples, (client + 1) * setting.examples)
        every = np.load(folder / "train-pixels.npy", mmap_mode="r")
        pixels = every[own].transpose(0, 2, 3, 1)
        if setting.source == "hugging-face":
            source = hugging_face(pixels, targets.tolist(), transforms.Compose(steps))
            options["collate_fn"] = pairs
        else:
            place = folder / "folders" / str(client)
            source = image_folder(place, pixels, targets.tolist(), steps)
    return DataLoader(source, setting.batch, shuffle=True, **options)


def hugging_face(pixels: Any, targets: list[int], transform: Any) -> Dataset[Any]:
    """Return a Hugging Face data set of images, (N, H, W, C), with a transform."""
    import datasets

    features = {"image": datasets.Image(), "label": datasets.Value("int64")}
    images = [*(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)]
    table = datasets.Dataset.from_dict(
        {"image": images, "label": targets}, datasets.Features(features)
    )

    def transformed(batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"image": [transform(image) for image in batch["image"]]}

    found: Dataset[Any] = table.with_transform(transformed)
    return found


def pairs(examples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return a batch of the examples of ``hugging_face``."""
    inputs = torch.stack([example["image"] for example in examples])
    return inputs, torch.tensor([example["label"] for example in examples])


def image_folder(
    place: Path, pixels: Any, targets: list[int], steps: list[Any]
) -> Dataset[Any]:
    """Return images in folders with random crops and flips.

    The images are JPEG files of 256 x 256 pixels. If the folder does not exist, it is
    written.
    """
    from PIL import Image
    from torchvision.datasets import ImageFolder

    size = pixels.shape[1]
    if not place.exists():
        for label in range(10):
            (place / str(label)).mkdir(parents=True)
        for number, (image, label) in enumerate(zip(pixels, targets, strict=True)):
            large = Image.fromarray(image).resize((256, 256))
            large.save(place / str(label) / f"{number}.jpg")
    augment = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    found: Dataset[Any] = ImageFolder(
        str(place), transforms.Compose([*augment, *steps]), allow_empty=True
    )
    return found

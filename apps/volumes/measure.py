"""Dice and HD95 of a client's own model on its test volumes, by MONAI:
``python -m apps.volumes.measure RUN SITE``, where SITE is the client's number.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from monai.metrics import DiceMetric, HausdorffDistanceMetric
from monai.networks.utils import one_hot
from torch import Tensor

from apps.volumes.sites import volumes
from fedbn_flwr.lab.results.saved_model import load_model

__all__ = ["measured", "predictions"]


def predictions(run: Path, site: int) -> tuple[Tensor, Tensor]:
    """Return the predicted and the true class of each voxel of a site's test volumes,
    int64 (N, D, H, W).
    """
    model, data = load_model(run, site), volumes(site, "test")
    images, labels = zip(*(data[at] for at in range(len(data))), strict=True)
    with torch.no_grad():
        logits = torch.cat([model(image[None]) for image in images])
    return logits.argmax(1), torch.stack(labels)


def measured(
    predicted: Tensor, labels: Tensor, num_classes: int = 2
) -> tuple[Tensor, Tensor]:
    """Return Dice, and HD95 in voxels, of each volume and each class but the
    background: (N, num_classes - 1) each.
    """
    pair = [one_hot(classes[:, None], num_classes) for classes in (predicted, labels)]
    return (
        DiceMetric(include_background=False)(*pair),
        HausdorffDistanceMetric(include_background=False, percentile=95)(*pair),
    )


if __name__ == "__main__":
    dice, hd95 = measured(*predictions(Path(sys.argv[1]), int(sys.argv[2])))
    print(f"Dice {dice.nanmean():.4f}, HD95 {hd95[hd95.isfinite()].mean():.2f} voxels")

"""How often does the doctor name a healthy site, and from which share reversed labels?

::

    HEART=FOLDER python benchmarks/doctor_sites.py

Healthy: scikit-learn's digits, dealt to four sites at random; no site may be named.
Planted: one of these sites has other images. Reversed: a share of the labels of one of
the four hospitals of UCI heart disease. The table is on the page ``docs/doctor.md``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from fedbn_flwr.doctor.clients import ClientExamples
from fedbn_flwr.doctor.damage import damage
from fedbn_flwr.doctor.sites import LOOKS, SiteRow, compare_sites, inputs_of

SITES, DRAWS = 4, 100
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "healthy": lambda x: x,
    "inverted": lambda x: 1 - x,
    "blurred": lambda x: functional.avg_pool2d(x, 3, 1, 1),
    "darker": lambda x: 0.7 * x,
    "x 60/255": lambda x: x * 60 / 255,
    "rotated": lambda x: x.rot90(1, (2, 3)),
}


def rows_of(seed: int, change: Callable[[Tensor], Tensor]) -> list[SiteRow]:
    """Return the table of four sites, the last one with changed images."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    order = np.random.default_rng(seed).permutation(len(images))
    sites = []
    for k, part in enumerate(np.array_split(order, SITES)):
        own, labels = images[part], torch.tensor(data.target[part])
        sites.append(ClientExamples(str(k), change(own) if k == 3 else own, labels, 8))
    inputs = inputs_of(nn.Flatten(), sites)
    return compare_sites(sites, inputs, torch.Generator().manual_seed(seed))


def of_images(draws: int) -> None:
    for name, change in CHANGES.items():
        right, wrong, looks = 0, 0, 0
        for seed in range(draws if name == "healthy" else draws // 10):
            rows = rows_of(seed, change)
            wrong += any(row.other_inputs or row.damage for row in rows[:3])
            right += bool(rows[3].other_inputs)
            looks += {*rows[3].other_inputs[:1]} <= {*LOOKS} and bool(
                rows[3].other_inputs
            )
        print(
            f"{name}: site 3 named {right}, by its look first {looks}, another site {wrong}"
        )


def of_labels(draws: int) -> None:
    from apps.heart import patients

    for hospital in range(SITES):
        for share in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0):
            named, wrong = 0, 0
            for seed in range(draws // 10):
                sites = []
                for k in range(SITES):
                    data = patients(k, "train")
                    inputs, targets = data.tensors
                    if k == hospital:
                        draw = np.random.default_rng(seed).random(len(targets))
                        turned = torch.tensor(draw < share)
                        targets = torch.where(turned, 1 - targets, targets)
                    sites.append(ClientExamples(str(k), inputs, targets, 8))
                texts = damage(sites, [str(j) for j in range(13)])
                found = {k for k, own in enumerate(texts) if "reverse" in " ".join(own)}
                named += hospital in found
                wrong += bool(found - {hospital})
            rows = len(sites[hospital])
            print(
                f"{share:.0%} reversed at hospital {hospital} ({rows}): {named}, elsewhere {wrong}"
            )


if __name__ == "__main__":
    count = int(sys.argv[1]) if sys.argv[1:] else DRAWS
    torch.set_num_threads(1)
    of_images(count)
    if "HEART" in os.environ:
        of_labels(count)

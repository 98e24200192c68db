"""Subsets make normalised batches from shared bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torchvision.transforms.functional import normalize

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.augment import Augment
from fedbn_flwr.lab.data.samples import Samples
from fedbn_flwr.lab.data.subset import Subset

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def test_a_batch_has_the_chosen_images_normalised(device) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (50, 3, 6, 6), generator=generator).byte()
    samples = Samples(pixels, torch.arange(50) % 10)
    indices = np.array([40, 3, 3, 17])
    subset = Subset(samples.to(device), indices, mean=MEAN, std=STD)
    inputs, targets = subset.batch(torch.tensor([3, 0, 1]))
    chosen = samples.inputs[[17, 40, 3]]
    assert len(subset) == 4
    assert inputs.dtype == torch.float32
    assert inputs.device.type == device.type
    exact = normalize(chosen.double() / 255, MEAN, STD)
    torch.testing.assert_close(inputs.cpu().double(), exact, rtol=1e-6, atol=1e-6)
    assert targets.tolist() == [7, 0, 3]
    assert targets.dtype == torch.int64
    assert subset.targets.tolist() == [0, 3, 3, 7]
    # a test has no generator
    augment = Augment.parse("crop2,flip")
    tested = Subset(samples, indices, mean=MEAN, std=STD, augment=augment)
    again = tested.batch(torch.tensor([3, 0, 1]))[0]
    assert torch.equal(again, inputs.cpu())


IMAGES, CLASSES = torch.zeros(2, 1, 3, 3).byte(), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (IMAGES.double(), CLASSES, "inputs are torch.float64"),
        (IMAGES[:, 0], CLASSES, r"shape \(2, 3, 3\)"),
        (IMAGES, torch.zeros(3, dtype=torch.int64), r"shape \(3,\)"),
        (IMAGES, CLASSES.double(), "targets are torch.float64"),
    ],
)
def test_samples_check_their_form(
    inputs: torch.Tensor, targets: torch.Tensor, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Samples(inputs, targets)


@pytest.mark.parametrize("size", [(1, 8, 8), (3, 4, 4), (3, 5, 3)])
@pytest.mark.parametrize("block", [1, 5000, 2**21])
def test_batches_made_together_have_the_bits_of_each_alone(
    monkeypatch, size: tuple[int, int, int], block: int
) -> None:
    """Matrix products of a model also have the same bits.

    Their last bits may depend on a batch's place in memory.
    """
    monkeypatch.setattr("fedbn_flwr.lab.data.subset._BLOCK", block)
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (60, *size), generator=draw).byte()
    channels = {"mean": (0.2,) * size[0], "std": (0.3,) * size[0]}
    made = Subset(
        Samples(pixels, torch.arange(60) % 3), torch.arange(60).flip(0), **channels
    )
    order = [torch.randint(60, (n,), generator=draw) for n in (7, 0, 1, 16, 7, 33, 2)]
    weights = torch.randn(math.prod(size), 5, generator=draw)
    for positions, found in zip(order, made.batches(iter(order)), strict=True):
        (inputs, targets), (alone, expected) = found, made.batch(positions)
        assert torch.equal(inputs, alone)
        assert torch.equal(targets, expected)
        assert torch.equal(inputs.flatten(1) @ weights, alone.flatten(1) @ weights)
        assert inputs.is_contiguous()
        # Torch aligns the memory of a batch that is made by itself.
        assert inputs.untyped_storage().nbytes() <= max(block, 33 * 4 * len(weights))

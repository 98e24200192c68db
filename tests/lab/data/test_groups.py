"""Samples with groups and with classes of pixels, and subsets of them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbn_flwr.lab.data.augment import Augment
from fedbn_flwr.lab.data.samples import Samples, Shape, reshaped
from fedbn_flwr.lab.data.subset import Subset

STATS = {"mean": (0.5,), "std": (0.25,)}


def images(count: int, height: int = 3, width: int = 3) -> Tensor:
    return torch.randint(
        0,
        256,
        (count, 1, height, width),
        generator=torch.Generator().manual_seed(count),
    ).byte()


def grouped(groups: list[int]) -> Samples:
    return Samples(images(len(groups)), torch.arange(len(groups)), torch.tensor(groups))


def test_groups_and_units_follow_the_samples_and_the_subset() -> None:
    samples = grouped([2, 0, 1, 0])
    samples = samples.regrouped(samples.groups, torch.tensor([7, 3, 7, 5]))
    for same in (
        samples.to("cpu"),
        reshaped(samples, Shape(1, 5, 5)),
        reshaped(samples, Shape(3, *samples.shape[1:])),
    ):
        assert torch.equal(same.groups, samples.groups)
        assert torch.equal(same.units, samples.units)
        assert torch.equal(same.targets, samples.targets)
    assert Subset(samples, torch.tensor([3, 0]), **STATS).groups.tolist() == [0, 2]
    assert Subset(samples, torch.tensor([3, 0]), **STATS).units.tolist() == [5, 7]
    assert Subset(samples, None, **STATS).groups is samples.groups
    assert torch.equal(samples.labels, samples.targets)
    assert not samples.by_pixel


def test_augmentation_moves_image_and_classes_alike_and_pads_with_255() -> None:
    # The pixel values are the classes, so an augmentation moves both together.
    values = images(50, 4, 6)
    samples = Samples(values, values[:, 0].clone())
    augment = Augment(crop=2, flip=True)
    subset = Subset(samples, None, mean=(0.0,), std=(1.0,), augment=augment)
    inputs, targets = subset.batch(torch.arange(50), torch.Generator().manual_seed(1))
    expected = augment(samples.inputs, torch.Generator().manual_seed(1))
    ones = augment(torch.ones_like(samples.inputs), torch.Generator().manual_seed(1))
    assert torch.equal(inputs, expected.float() / 255)
    assert torch.equal(
        targets, torch.where(ones[:, 0] == 1, expected[:, 0].long(), 255)
    )
    assert (ones == 0).any()


def test_pixel_targets_are_resized_to_the_nearest() -> None:
    inputs = torch.zeros(1, 1, 2, 4, dtype=torch.uint8)
    targets = torch.tensor([[[0, 1, 2, 255], [3, 4, 5, 6]]], dtype=torch.uint8)
    larger = reshaped(Samples(inputs, targets), Shape(1, 4, 8))
    assert torch.equal(
        larger.targets, targets.repeat_interleave(2, 1).repeat_interleave(2, 2)
    )
    smaller = reshaped(larger, Shape(1, 2, 4))
    assert torch.equal(smaller.targets, targets)

"""Samples with groups and with classes of pixels, and subsets of them."""

from __future__ import annotations

import torch

from fedbn_flwr.lab.data.samples import Samples, Shape, reshaped
from fedbn_flwr.lab.data.subset import Subset


def test_groups_and_units_follow_the_subset() -> None:
    groups, units = torch.tensor([2, 0, 1, 0]), torch.tensor([7, 3, 7, 5])
    images = torch.zeros(4, 1, 3, 3).byte()
    samples = reshaped(Samples(images, torch.arange(4), groups, units), Shape(1, 5, 5))
    subset = Subset(samples, torch.tensor([3, 0]), mean=(0.5,), std=(0.25,))
    assert (subset.groups.tolist(), subset.units.tolist()) == ([0, 2], [5, 7])


def test_pixel_targets_are_resized_to_the_nearest() -> None:
    inputs = torch.zeros(1, 1, 2, 4, dtype=torch.uint8)
    targets = torch.tensor([[[0, 1, 2, 255], [3, 4, 5, 6]]], dtype=torch.uint8)
    larger = reshaped(Samples(inputs, targets), Shape(1, 4, 8))
    assert torch.equal(
        larger.targets, targets.repeat_interleave(2, 1).repeat_interleave(2, 2)
    )
    # the middle of three
    row = Samples(
        inputs.view(1, 1, 1, 8)[..., :6], torch.arange(6).byte().view(1, 1, 6)
    )
    assert reshaped(row, Shape(1, 1, 2)).targets.tolist() == [[[1, 4]]]

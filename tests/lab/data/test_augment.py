"""Augmentation equals a slow oracle for each sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.augment import Augment


def oracle(inputs: Tensor, crop: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Augment one image and one pixel at a time, in Python."""
    count, channels, height, width = inputs.shape
    offsets = (
        torch.randint(0, 2 * crop + 1, (2, count), generator=generator).tolist()
        if crop
        else [[0] * count] * 2
    )
    flips = (
        (torch.rand(count, generator=generator) < 0.5).tolist()
        if flip
        else [False] * count
    )
    out = torch.empty_like(inputs)
    for n in range(count):
        for c in range(channels):
            for y in range(height):
                for x in range(width):
                    column = width - 1 - x if flips[n] else x
                    row, column = (
                        y + offsets[0][n] - crop,
                        column + offsets[1][n] - crop,
                    )
                    inside = 0 <= row < height and 0 <= column < width
                    out[n, c, y, x] = inputs[n, c, row, column] if inside else 0
    return out


def images(count: int, channels: int, height: int, width: int, seed: int = 0) -> Tensor:
    shape = (count, channels, height, width)
    return torch.randint(
        1, 256, shape, generator=torch.Generator().manual_seed(seed)
    ).to(torch.uint8)


@pytest.mark.parametrize(
    ("text", "crop", "flip"),
    [("crop2", 2, False), ("flip", 0, True), (" flip , crop3", 3, True)],
)
def test_equals_the_oracle(text: str, crop: int, flip: bool, device) -> None:
    inputs = images(9, 3, 5, 7)
    augment = Augment.parse(text)
    assert augment == Augment(crop, flip)
    got = augment(inputs.to(device), torch.Generator().manual_seed(3)).cpu()
    assert got.dtype == torch.uint8
    assert torch.equal(
        got, oracle(inputs, crop, flip, torch.Generator().manual_seed(3))
    )


@pytest.mark.parametrize("seed", range(4))
def test_classes_of_pixels_move_with_their_image(seed: int) -> None:
    """Padding around an image is ignored."""
    generator = torch.Generator().manual_seed(seed)
    inputs = images(6, 1, 5, 7, seed) % 254 + 1  # neither 0, the padding, nor 255
    augment = Augment(crop=seed % 4, flip=seed % 3 > 0)
    draw = augment.draw(len(inputs), generator)
    moved, classes = augment.apply(inputs, inputs[:, 0], draw)
    assert classes.equal(torch.where(moved == 0, 255, moved)[:, 0])


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("crop", "crop"),
        ("crop0", "crop0"),
        ("crop-1", "crop-1"),
        ("flop", "flop"),
        ("flip,", ""),
        ("flip,flip", "flip"),
        ("crop2,crop2", "crop2"),
        ("crop2,crop4", "crop4"),
    ],
)
def test_unknown_and_repeated_entries_are_refused(text: str, entry: str) -> None:
    with pytest.raises(ConfigError, match=f"'{entry}' is"):
        Augment.parse(text)
    # as large as the image
    with pytest.raises(ConfigError, match="crop3"):
        Augment(crop=4)(images(1, 1, 4, 9), torch.Generator())

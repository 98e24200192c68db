"""Random changes of a batch of byte images, drawn from a given generator.

Crops with padding and flips work on the batch, on uint8 pixels before normalisation. As
in torchvision's ``RandomCrop(size, padding=N)`` and then ``RandomHorizontalFlip()``, the
padding has pixel value 0 (black). Other transforms are part of a data set that a
function of the user returns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr.errors import ConfigError


class Draw(NamedTuple):
    """The random draws for a batch of B images.

    A field is None if the augmentation does not use these draws.

    Attributes:
        offsets: rows and columns of the crops, (2, B).
        flips: whether each image is mirrored, (B,).
    """

    offsets: Tensor | None
    flips: Tensor | None


@dataclass(frozen=True, slots=True)
class Augment:
    """The random changes of each sample in a training batch.

    Attributes:
        crop: pixels of zero padding on each side, before a crop to the image's size;
            with 0, images are not cropped.
        flip: mirror left and right with probability 1/2.
    """

    crop: int = 0
    flip: bool = False

    @classmethod
    def parse(cls, text: str) -> Augment:
        """Return the augmentation that a text of ``augment`` describes.

        The text is not empty. It is a comma list of ``cropN`` (N >= 1 pixels) and
        ``flip``, in any order: crops come first.

        Raises:
            ConfigError: an entry is unknown, occurs twice, or crops by 0.
        """
        entries = [part.strip() for part in text.split(",")]
        crops = [
            entry for entry in entries if re.fullmatch(r"crop[1-9][0-9]{0,3}", entry)
        ]
        # Only the first crop counts as known, so a second crop of another size is
        # refused as unknown.
        known = ("flip", *crops[:1])
        for entry in entries:
            if entry not in known or entries.count(entry) > 1:
                raise ConfigError(
                    f"augment={text!r}: {entry!r} is unknown or occurs twice. Use a"
                    " comma list with at most one each of cropN (zero padding of N"
                    " >= 1 pixels, then a random crop) and flip, e.g. 'crop4,flip', or '' for no"
                    " augmentation. A data set of your own function may have any other"
                    " transform."
                )
        crop = int(crops[0].removeprefix("crop")) if crops else 0
        return cls(crop, "flip" in entries)

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the augmented copy of ``inputs``.

        Args:
            inputs: uint8 images, (B, C, H, W), on any device.
            generator: see ``draw``.

        Raises:
            ConfigError: the padding is as large as the image, so a crop could miss the
                image.
        """
        self.check(*inputs.shape[2:])
        labels = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        draw = self.draw(len(inputs), generator)
        return self.apply(inputs, labels, draw)[0]

    def check(self, height: int, width: int) -> None:
        """Raise ConfigError if a crop could miss an image of this size."""
        if self.crop >= min(height, width):
            raise ConfigError(
                f"augment: crop{self.crop} could miss an image of {height}x{width}"
                f" pixels. Use crop1 to crop{min(height, width) - 1}."
            )

    def draw(self, count: int, generator: torch.Generator) -> Draw:
        """Return the draws for a batch of ``count`` images.

        Args:
            count: images of the batch, B.
            generator: a CPU generator, so that every device gets the same draws. In
                this order: offsets of the crops, (2, B) integers in [0, 2 * crop], rows
                then columns; B flips.
        """
        offsets = flips = None
        if self.crop:
            most = 2 * self.crop
            offsets = torch.randint(0, most + 1, (2, count), generator=generator)
        if self.flip:
            flips = torch.rand(count, generator=generator) < 0.5
        return Draw(offsets, flips)

    def apply(
        self, inputs: Tensor, targets: Tensor, draw: Draw
    ) -> tuple[Tensor, Tensor]:
        """Return cropped and flipped images (uint8 (B, C, H, W)) and their targets.

        Classes of pixels move with the images; a crop adds 255, the ignored class,
        around them.
        """
        if targets.ndim != 3:
            return self._moved(inputs, draw), targets
        # Append the targets as one more channel, so that they move with the image. The
        # crop pads with 0, but padding must become class 255 (ignored), so the channel
        # has the complement of the targets.
        both = self._moved(torch.cat([inputs, ~targets.unsqueeze(1)], dim=1), draw)
        return both[:, :-1], ~both[:, -1]

    def _moved(self, inputs: Tensor, draw: Draw) -> Tensor:
        if draw.offsets is not None:
            self.check(*inputs.shape[2:])
            inputs = _crop(inputs, self.crop, draw.offsets.to(inputs.device))
        if draw.flips is not None:
            flips = draw.flips.to(inputs.device).view(-1, 1, 1, 1)
            inputs = torch.where(flips, inputs.flip(3), inputs)
        return inputs


def _crop(inputs: Tensor, padding: int, offsets: Tensor) -> Tensor:
    """Return the windows of the zero-padded ``inputs`` at ``offsets``.

    Args:
        inputs: uint8 images (B, C, H, W).
        padding: pixels on each side.
        offsets: row and column of the first pixel of each window, (2, B).
    """
    count, channels, height, width = inputs.shape
    padded = F.pad(inputs, (padding, padding, padding, padding))
    # Compute the index of each wanted pixel in the padded image. One gather with these
    # indices serves all images; a loop over the images is much slower.
    rows = (
        offsets[0].view(-1, 1, 1) + torch.arange(height, device=inputs.device)[:, None]
    )
    columns = offsets[1].view(-1, 1, 1) + torch.arange(width, device=inputs.device)
    wanted = (rows * padded.shape[3] + columns).flatten(1)
    wanted = wanted.unsqueeze(1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, wanted).view(count, channels, height, width)

"""Random crops and flips of a batch of byte images, drawn for each sample from a given generator.

Works on uint8 pixels before normalisation, so the padding is pixel value 0 (black), as in torchvision's
``RandomCrop(size, padding=N)`` and then ``RandomHorizontalFlip()``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr.errors import ConfigError

__all__ = ["Augment"]


@dataclass(frozen=True, slots=True)
class Augment:
    """The random changes of each sample in a training batch.

    Attributes:
        crop: pixels of zero padding on each side, before a crop to the image's size; 0 = no crop.
        flip: mirror left and right with probability 1/2.
    """

    crop: int = 0
    flip: bool = False

    @classmethod
    def parse(cls, text: str) -> Augment | None:
        """Return the augmentation of a comma list of ``cropN`` (N >= 1 pixels) and ``flip``; None for ``""``.

        Crops always come before flips; the other order has the same distribution.

        Raises:
            ConfigError: an entry is unknown, is there twice, or crops by 0.
        """
        if not text.strip():
            return None
        crop, flip = 0, False
        for entry in (part.strip() for part in text.split(",")):
            match = re.fullmatch(r"crop([1-9][0-9]{0,3})", entry)
            repeated = (match is not None and crop > 0) or (entry == "flip" and flip)
            if repeated or (match is None and entry != "flip"):
                problem = "is there twice" if repeated else "is unknown"
                raise ConfigError(
                    f"augment={text!r}: {entry!r} {problem}. Allowed: a comma list with at most one each of cropN "
                    "(zero padding of N >= 1 pixels, then a random crop) and flip, e.g. 'crop4,flip', or '' for none."
                )
            if match is not None:
                crop = int(match[1])
            else:
                flip = True
        return cls(crop=crop, flip=flip)

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the augmented copy of ``inputs``.

        Args:
            inputs: uint8 images, (B, C, H, W), on any device.
            generator: a CPU generator, so that every device gets the same draws. The first call draws the offsets of
                the crops, (2, B) integers in [0, 2 * crop], rows then columns; the second draws B flips.

        Raises:
            ConfigError: the padding is as large as the image, so a crop could miss the image.
        """
        count, _, height, width = inputs.shape
        if self.crop >= min(height, width):
            raise ConfigError(
                f"augment: crop{self.crop} could miss an image of {height}x{width} pixels altogether. "
                f"Use crop1 to crop{min(height, width) - 1}."
            )
        if self.crop:
            offsets = torch.randint(0, 2 * self.crop + 1, (2, count), generator=generator)
            inputs = _crop(inputs, self.crop, offsets.to(inputs.device))
        if self.flip:
            flips = torch.rand(count, generator=generator) < 0.5
            inputs = torch.where(flips.to(inputs.device).view(-1, 1, 1, 1), inputs.flip(3), inputs)
        return inputs

    def with_pixels(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return augmented images and the classes of their pixels, moved in the same way.

        Args:
            inputs: as in ``__call__``, which makes the same draws and the same images.
            targets: uint8 classes, (B, H, W); a crop adds 255, the ignored class, around them.
            generator: as in ``__call__``.

        Raises:
            ConfigError: as in ``__call__``.
        """
        # The targets are one more channel, complemented: a padding of 0 then means class 255.
        both = self(torch.cat([inputs, ~targets.unsqueeze(1)], dim=1), generator)
        return both[:, :-1], ~both[:, -1]


def _crop(inputs: Tensor, padding: int, offsets: Tensor) -> Tensor:
    """Return the windows of the zero-padded ``inputs`` (B, C, H, W) at ``offsets`` (2, B), with one gather."""
    count, channels, height, width = inputs.shape
    padded = F.pad(inputs, (padding, padding, padding, padding))
    rows = offsets[0].view(-1, 1, 1) + torch.arange(height, device=inputs.device).view(1, -1, 1)
    columns = offsets[1].view(-1, 1, 1) + torch.arange(width, device=inputs.device).view(1, 1, -1)
    flat = (rows * padded.shape[3] + columns).flatten(1).unsqueeze(1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, flat).view(count, channels, height, width)

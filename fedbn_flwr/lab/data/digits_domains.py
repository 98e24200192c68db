"""Five domains without a download, made from scikit-learn's digits.

Ours, for tests of feature shift: each domain changes the digits in its own way, in
integer arithmetic and with fixed seeds, so the bytes are the same on every machine and
in every run. Each training digit is in one domain, and every domain has digits of every
class. The test digits are in all domains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr.lab.data.readers import Loaded, read_digits
from fedbn_flwr.lab.data.samples import Samples, Shape, reshaped
from fedbn_flwr.training.randomness import numpy_generator

Transform = Callable[[Tensor, np.random.Generator], Tensor]
"""Maps grey values 0..255, int64 (N, 1, H, W), to (N, 1 or 3, H, W)."""

_SEED = 0
_NOISE = 96


def _inverted(images: Tensor, rng: np.random.Generator) -> Tensor:
    return 255 - images


def _blurred(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the images convolved with (1 2 1; 2 4 2; 1 2 1) / 16.

    The images are padded with zeros.
    """
    padded = F.pad(images, (1, 1, 1, 1))
    # Apply the kernel (1 2 1) over the rows, then over the columns. Its weights sum to
    # 16, and adding 8 before the division rounds the result.
    rows = padded[:, :, :-2] + 2 * padded[:, :, 1:-1] + padded[:, :, 2:]
    return (rows[..., :-2] + 2 * rows[..., 1:-1] + rows[..., 2:] + 8) // 16


def _noisy(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the images with an integer from -96..96 added to each pixel."""
    noise = torch.from_numpy(rng.integers(-_NOISE, _NOISE + 1, images.shape))
    return (images + noise).clamp(0, 255)


def _coloured(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Return each image in two random colours, dark for 0 and bright for 255."""
    dark, bright = (
        torch.from_numpy(rng.integers(low, low + 128, (len(images), 3, 1, 1)))
        for low in (0, 128)
    )
    return (images * bright + (255 - images) * dark + 127) // 255


def _rotated(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the images turned by 90 degrees, counterclockwise."""
    return images.rot90(1, (2, 3))


DOMAINS: dict[str, Transform] = {
    "inverted": _inverted,
    "blurred": _blurred,
    "noisy": _noisy,
    "coloured": _coloured,
    "rotated": _rotated,
}
"""The transformation of each domain, by name."""


def read_digits_domains(folder: Path, shape: Shape) -> Loaded:
    """Return the five domains, 8x8 RGB, without reading a file.

    There are 1,438 training images in all, and 359 test images in each domain.
    """
    train, test, _ = read_digits(folder, shape)
    every_digit = torch.arange(len(test))
    parts = {}
    chosen = _split_over_domains(train.targets)
    for name, indices in zip(DOMAINS, chosen, strict=True):
        parts[name] = Loaded(
            _transformed(train, indices, name, "train"),
            _transformed(test, every_digit, name, "test"),
        )
    # The domains are made at the published size of 8x8 pixels. The caller resizes the
    # images if the model needs another size.
    return merged(parts, Shape(3, 8, 8))


def merged(parts: Mapping[str, Loaded], shape: Shape) -> Loaded:
    """Return the images of all domains as one data set in this shape."""
    return Loaded(
        joined([reshaped(domain.train, shape) for domain in parts.values()]),
        joined([reshaped(domain.test, shape) for domain in parts.values()]),
        tuple(parts),
    )


def joined(parts: Sequence[Samples]) -> Samples:
    """Return the samples of all parts in one set. Each part is a group."""
    inputs = torch.cat([part.inputs for part in parts])
    targets = torch.cat([part.targets for part in parts])
    return Samples(inputs, targets, numbers(parts))


def numbers(parts: Sequence[Sized]) -> Tensor:
    """Return the number of the part of each example."""
    sizes = torch.tensor([len(part) for part in parts])
    return torch.repeat_interleave(torch.arange(len(parts)), sizes)


def _split_over_domains(targets: Tensor) -> list[Tensor]:
    """Return the indices of the digits in each domain.

    The sizes of the domains differ by at most one.
    """
    labels = targets.numpy()
    rng = numpy_generator(_SEED, "digits-domains")
    order = np.concatenate(
        [rng.permutation(np.flatnonzero(labels == label)) for label in range(10)]
    )
    # The order is sorted by class, so every fifth example of it gives each domain all
    # classes in equal shares.
    parts = []
    for start in range(len(DOMAINS)):
        parts.append(torch.from_numpy(np.sort(order[start :: len(DOMAINS)])))
    return parts


def _transformed(samples: Samples, indices: Tensor, name: str, part: str) -> Samples:
    rng = numpy_generator(_SEED, "digits-domains", name, part)
    images = DOMAINS[name](samples.inputs[indices].to(torch.int64), rng)
    images = images.to(torch.uint8).expand(-1, 3, -1, -1)
    return Samples(images, samples.targets[indices])

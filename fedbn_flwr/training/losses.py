"""The losses of the tasks other than cross-entropy.

Each is a mean over the targets that count. Torch only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "IGNORED_PIXEL",
    "LossFn",
    "label_cross_entropy",
    "pixel_cross_entropy",
    "squared_error",
]

LossFn = Callable[[Tensor, Tensor], Tensor]
IGNORED_PIXEL = 255
"""The target of a pixel that does not count."""


def pixel_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the pixels that are not 255.

    The loss is 0 if all pixels are 255 (torch's own mean is NaN).

    Args:
        outputs: logits (B, classes, H, W), or (B, classes, D, H, W) of voxels.
        targets: classes, int64 (B, H, W), or (B, D, H, W).
    """
    total = F.cross_entropy(
        outputs, targets, ignore_index=IGNORED_PIXEL, reduction="sum"
    )
    counted = (targets != IGNORED_PIXEL).sum()
    return total / counted.clamp(min=1)


def label_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean binary cross-entropy over the known labels.

    Unknown labels are NaN. The loss is 0 if all labels are unknown.

    Args:
        outputs: logits (B, labels), or (B,) for one label.
        targets: 0, 1 or NaN, with as many numbers as ``outputs``.
    """
    outputs, targets, known = _known(outputs, targets)
    # the weight of an unknown label is 0
    total = F.binary_cross_entropy_with_logits(outputs, targets, known, reduction="sum")
    return total / known.sum().clamp(min=1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error over the known targets.

    Unknown targets are NaN. The loss is 0 if all targets are unknown.

    Args:
        outputs: (B, columns), or (B,) for one column.
        targets: numbers or NaN, with as many numbers as ``outputs``.
    """
    outputs, targets, known = _known(outputs, targets)
    total = F.mse_loss(outputs * known, targets, reduction="sum")
    return total / known.sum().clamp(min=1)


def _known(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, targets and a mask, of one shape and dtype.

    Unknown targets (NaN) become 0. The mask is 1 for known and 0 for unknown targets.
    """
    # Use at least float32, because half precision rounds targets and counts.
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    targets = targets.to(dtype).view_as(outputs)
    unknown = targets.isnan()
    return outputs.to(dtype), targets.masked_fill(unknown, 0), (~unknown).to(dtype)

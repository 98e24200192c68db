"""The losses of the tasks besides cross-entropy: means over the targets that count. Torch only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "IGNORED_PIXEL",
    "LossFn",
    "balanced_weights",
    "label_cross_entropy",
    "pixel_cross_entropy",
    "squared_error",
    "weighted_loss",
]

LossFn = Callable[[Tensor, Tensor], Tensor]
IGNORED_PIXEL = 255
"""The target of a pixel that does not count."""


def pixel_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the pixels that are not 255; 0 if all pixels are (torch's own mean is NaN).

    Args:
        outputs: logits (B, classes, H, W), or (B, classes, D, H, W) of voxels.
        targets: classes, int64 (B, H, W), or (B, D, H, W).
    """
    total = F.cross_entropy(outputs, targets, ignore_index=IGNORED_PIXEL, reduction="sum")
    return total / (targets != IGNORED_PIXEL).sum().clamp(min=1)


def label_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean binary cross-entropy over the labels that are not NaN (unknown); 0 if all are.

    Args:
        outputs: logits (B, labels), or (B,) for one label.
        targets: 0, 1 or NaN, of as many numbers.
    """
    outputs, targets, known = _known(outputs, targets)
    return F.binary_cross_entropy_with_logits(outputs, targets, known, reduction="sum") / known.sum().clamp(min=1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error over the targets that are not NaN (unknown); 0 if all are.

    Args:
        outputs: (B, columns), or (B,) for one column.
        targets: of as many numbers.
    """
    outputs, targets, known = _known(outputs, targets)
    return F.mse_loss(outputs * known, targets, reduction="sum") / known.sum().clamp(min=1)


def _known(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, targets with 0 for NaN, and 1 where a target is known else 0, of one shape and dtype."""
    dtype = torch.promote_types(outputs.dtype, torch.float32)  # half precision rounds targets and counts
    targets = targets.to(dtype).view_as(outputs)
    unknown = targets.isnan()
    return outputs.to(dtype), targets.masked_fill(unknown, 0), (~unknown).to(dtype)


def balanced_weights(targets: Tensor, num_classes: int, ignore: int) -> tuple[float, ...]:
    """Return w_c = n / (K n_c), for which all classes together weigh the same; 0 for a class without a target.

    n targets count, K classes have some, n_c of class c. This is scikit-learn's ``class_weight="balanced"``.

    Args:
        targets: classes of any shape and dtype; ``ignore`` and NaN do not count.
        num_classes: number of classes.
        ignore: targets with this value do not count.
    """
    known = targets[~targets.isnan()] if targets.is_floating_point() else targets
    counts = torch.bincount(known[known != ignore].long().flatten(), minlength=num_classes)
    present = counts > 0
    weights = counts.sum() / (int(present.sum()) * counts.double().clamp(min=1))
    return tuple(torch.where(present, weights, 0.0).tolist())


def weighted_loss(weights: Sequence[float], ignore: int, *, single: bool = False) -> LossFn:
    """Return the cross-entropy in which a target of class c weighs w_c: sum of w_y times loss / sum of w_y in a batch.

    That is ``torch.nn.functional.cross_entropy(outputs, targets, weight=weights, ignore_index=ignore)``; 0 where no
    target of the batch counts (torch's own mean is NaN).

    Args:
        weights: of the classes 0, 1, ...
        ignore: targets with this value do not count.
        single: there is one logit for class 1, and targets are 0, 1 or NaN (unknown).
    """
    table = torch.tensor(weights, dtype=torch.float32)
    by_device: dict[torch.device, Tensor] = {}  # a copy to a GPU in each step would wait for it

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        weight = by_device.get(outputs.device)
        if weight is None:
            weight = by_device[outputs.device] = table.to(outputs.device)
        weight = weight.to(torch.promote_types(outputs.dtype, torch.float32))
        if single:
            outputs, targets, known = _known(outputs, targets)
            each = known * weight[(targets > 0).long()]
            total = F.binary_cross_entropy_with_logits(outputs, targets, each, reduction="sum")
        else:
            outputs, known = outputs.to(weight.dtype), targets != ignore
            each = known * weight[torch.where(known, targets, 0)]
            total = F.cross_entropy(outputs, targets, weight, ignore_index=ignore, reduction="sum")
        return total / each.sum().clamp(min=torch.finfo(each.dtype).tiny)

    return loss

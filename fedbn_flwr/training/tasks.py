"""What is learned: a class for each image, or for each of its pixels. Torch only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["CLASSIFICATION", "SEGMENTATION", "LossFn", "Task", "confusion", "mean_iou", "pixel_cross_entropy"]

LossFn = Callable[[Tensor, Tensor], Tensor]
_IGNORED_PIXEL = 255


def pixel_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the pixels that are not 255; 0 where all are (torch's own mean is NaN).

    Args:
        outputs: logits (B, classes, H, W).
        targets: classes, int64 (B, H, W).
    """
    total = F.cross_entropy(outputs, targets, ignore_index=_IGNORED_PIXEL, reduction="sum")
    return total / (targets != _IGNORED_PIXEL).sum().clamp(min=1)


@dataclass(frozen=True)
class Task:
    """A task: its loss, and what its tests count.

    Attributes:
        name: in messages.
        loss: mean loss of a batch of (outputs (B, classes, ...), targets (B, ...)).
        ignore: the target that neither trains nor counts.
        score: the metric that a run is judged by, "accuracy" or "miou".
        test_batch: examples tested at a time; it bounds the memory, and its sums decide the last bits.
    """

    name: str = "classification"
    loss: LossFn = F.cross_entropy
    ignore: int = -100
    score: str = "accuracy"
    test_batch: int = 500

    def counted(self, targets: Tensor) -> Tensor:
        """Return how many targets count: images, or pixels."""
        return (targets != self.ignore).sum()


CLASSIFICATION = Task()
SEGMENTATION = Task("segmentation", pixel_cross_entropy, _IGNORED_PIXEL, "miou", 8)


def confusion(outputs: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """Return how many targets of class i were taken for class j, int64 (classes, classes).

    Args:
        outputs: logits (B, classes, ...).
        targets: classes, int64 (B, ...).
        ignore: targets equal to it are left out.
    """
    classes = outputs.shape[1]
    kept = targets != ignore
    cells = classes * targets[kept] + outputs.argmax(1)[kept]
    return torch.bincount(cells, minlength=classes**2).view(classes, classes)


def mean_iou(counts: Tensor) -> float:
    """Return the mean over classes of intersection / union, of a confusion matrix of a whole test set.

    As Cityscapes' own evaluation: classes that are neither among the targets nor among the predictions are left out.
    NaN where there is no class at all.
    """
    counts = counts.double()
    intersection = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - intersection
    return float((intersection / union)[union > 0].mean())

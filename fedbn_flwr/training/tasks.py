"""The learning tasks: a class for each image, or a class for each pixel. Torch only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr.errors import DataError

__all__ = ["CLASSIFICATION", "SEGMENTATION", "LossFn", "Task", "confusion", "mean_iou", "pixel_cross_entropy"]

LossFn = Callable[[Tensor, Tensor], Tensor]
_IGNORED_PIXEL = 255


def pixel_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the pixels that are not 255; 0 if all pixels are (torch's own mean is NaN).

    Args:
        outputs: logits (B, classes, H, W).
        targets: classes, int64 (B, H, W).
    """
    total = F.cross_entropy(outputs, targets, ignore_index=_IGNORED_PIXEL, reduction="sum")
    return total / (targets != _IGNORED_PIXEL).sum().clamp(min=1)


@dataclass(frozen=True)
class Task:
    """A task: its loss, and the targets that its tests count.

    Attributes:
        name: the name in messages.
        loss: mean loss of a batch of (outputs (B, classes, ...), targets (B, ...)).
        ignore: targets with this value neither train nor count.
        score: the main metric of a run, "accuracy" or "miou".
        test_batch: examples per test batch. It limits the memory, and it changes the last bits of sums.
    """

    name: str = "classification"
    loss: LossFn = F.cross_entropy
    ignore: int = -100
    score: str = "accuracy"
    test_batch: int = 500

    def counted(self, targets: Tensor) -> Tensor:
        """Return how many targets count: images, or pixels."""
        return (targets != self.ignore).sum()

    @staticmethod
    def on_device(targets: Any, device: torch.device) -> Tensor:
        """Return a batch's targets on the device.

        Raises:
            DataError: they are no tensor.
        """
        if not isinstance(targets, Tensor):
            raise DataError(f"labels are a {type(targets).__name__}; a tensor of class numbers, int64, needed.")
        return targets.to(device)

    @staticmethod
    def check(outputs: Tensor, targets: Tensor) -> None:
        """Check that argmax over the outputs can be compared with the targets; their values are not read.

        Raises:
            DataError: there is one output per example, or the targets are not class numbers.
        """
        shape = tuple(outputs.shape)
        if outputs.ndim < 2 or shape[1] < 2:
            raise DataError(
                f"the model gives one output per example, {shape}, and the built-in accuracy is the argmax over the "
                "outputs of the classes. Give the model two outputs and train it with cross-entropy."
            )
        if targets.is_floating_point() or tuple(targets.shape) != (shape[0], *shape[2:]):
            raise DataError(
                f"labels are {targets.dtype} of shape {tuple(targets.shape)} for outputs of shape {shape}; class "
                f"numbers needed, int64 {(shape[0], *shape[2:])}."
            )


CLASSIFICATION = Task()
SEGMENTATION = Task("segmentation", pixel_cross_entropy, _IGNORED_PIXEL, "miou", 8)


def confusion(outputs: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """Return how many targets of class i were classified as class j, int64 (classes, classes).

    Args:
        outputs: logits (B, classes, ...).
        targets: classes, int64 (B, ...).
        ignore: targets with this value are left out.
    """
    classes = outputs.shape[1]
    kept = targets != ignore
    cells = classes * targets[kept] + outputs.argmax(1)[kept]
    return torch.bincount(cells, minlength=classes**2).view(classes, classes)


def mean_iou(counts: Tensor) -> float:
    """Return the mean over classes of intersection / union, from the confusion matrix of a whole test set.

    As in Cityscapes' own evaluation, classes that are neither in the targets nor in the predictions are left out. NaN
    if no class is left.
    """
    counts = counts.double()
    intersection = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - intersection
    return float((intersection / union)[union > 0].mean())

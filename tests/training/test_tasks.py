"""The tasks: the loss over pixels, and the mean IoU compared with slow counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.errors import DataError
from fedbn_flwr.training import LearningRate, LocalTraining, train
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.tasks import CLASSIFICATION, SEGMENTATION, Task, confusion, mean_iou, pixel_cross_entropy


def pixels(count: int = 5, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Random logits and classes of 3 by 6 pixels; a third of them are ignored, and one image completely."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(count, classes, 3, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(classes, (count, 3, 6), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = 255
    targets[2] = 255
    return logits, targets


class Scenes:
    """Images whose pixels are the logits, and their classes."""

    def __init__(self, logits: Tensor, targets: Tensor) -> None:
        self.logits, self.targets = logits, targets

    def __len__(self) -> int:
        return len(self.logits)

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return self.logits[positions], self.targets[positions]


def scaling() -> nn.Module:
    model = nn.Conv2d(4, 4, 1, groups=4, bias=False).double()
    nn.init.ones_(model.weight)
    return model


def slow_iou(predicted: Tensor, targets: Tensor, classes: int) -> float:
    """The set of pixels of each class, by hand."""
    shares = []
    for label in range(classes):
        told = {
            i
            for i, (p, t) in enumerate(zip(predicted.flatten(), targets.flatten(), strict=True))
            if t != 255 and p == label
        }
        true = {i for i, t in enumerate(targets.flatten()) if t == label}
        if told | true:
            shares.append(len(told & true) / len(told | true))
    return math.fsum(shares) / len(shares)


def test_the_loss_is_the_mean_over_the_pixels_that_count() -> None:
    logits, targets = pixels()
    each = [
        -F.log_softmax(logits[n, :, y, x], 0)[targets[n, y, x]].item()
        for n, y, x in (targets != 255).nonzero().tolist()
    ]
    assert pixel_cross_entropy(logits, targets).item() == pytest.approx(math.fsum(each) / len(each), rel=1e-12)


def test_a_batch_of_ignored_pixels_has_no_loss_and_no_gradient() -> None:
    logits = torch.randn(2, 4, 3, 6, requires_grad=True)
    loss = pixel_cross_entropy(logits, torch.full((2, 3, 6), 255))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_of_pixels_for_every_batch_size(batch_size: int) -> None:
    logits, targets = pixels()
    result = evaluate(scaling(), Scenes(logits, targets), task=SEGMENTATION, batch_size=batch_size)
    predicted, counted = logits.argmax(1), targets != 255
    assert result.loss == pytest.approx(pixel_cross_entropy(logits, targets).item(), rel=1e-12)
    assert result.accuracy == (predicted == targets).sum().item() / counted.sum().item()
    assert result.miou == pytest.approx(slow_iou(predicted, targets, 4), rel=1e-12)
    assert result.num_examples == 5
    assert list(result.named("test-")) == ["test-loss", "test-accuracy", "test-miou"]


def test_classes_without_targets_and_predictions_are_left_out() -> None:
    counts = torch.tensor([[3, 1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 5]])
    assert mean_iou(counts) == pytest.approx((3 / 6 + 0 / 3 + 5 / 5) / 3)
    assert math.isnan(mean_iou(torch.zeros(3, 3)))


def test_the_confusion_matrix() -> None:
    logits, targets = pixels()
    counts = confusion(logits, targets, 255)
    predicted = logits.argmax(1)
    for true in range(4):
        for told in range(4):
            assert counts[true, told] == ((targets == true) & (predicted == told)).sum()


def test_what_argmax_cannot_judge_is_refused_before_it_is_counted(points) -> None:
    """One logit, a probability for each class, a label that is a float, text: each with what to do, in both loops."""
    data, binary = points(6, classes=2), Task(loss=F.binary_cross_entropy_with_logits)
    as_float = data.targets.double()
    cases: list[tuple[int, Any, Task, str]] = [
        (1, as_float[:, None], binary, "one output per example, (6, 1)"),
        (2, F.one_hot(data.targets).double(), CLASSIFICATION, "labels are torch.float64 of shape (6, 2)"),
        (2, as_float, CLASSIFICATION, "labels are torch.float64 of shape (6,)"),
        (2, data.targets[:, None], CLASSIFICATION, "labels are torch.int64 of shape (6, 1)"),
        (2, ["cat", "dog"] * 3, CLASSIFICATION, "labels are a list"),
    ]
    settings = LocalTraining(learning_rate=LearningRate(0.1), local_epochs=1, batch_size=0)
    for outputs, targets, task, said in cases:
        model = nn.Linear(5, outputs).double()
        wrong = Scenes(data.inputs, targets)
        wrong.batch = lambda positions, generator=None, t=targets: (data.inputs, t)  # type: ignore[method-assign]
        for loop in (
            lambda m=model, d=wrong, t=task: evaluate(m, d, task=t),
            lambda m=model, d=wrong, t=task: train(
                m, d, settings, learning_rate=0.1, stream=lambda _: torch.Generator(), task=t
            ),
        ):
            with pytest.raises(DataError) as caught:
                loop()
            assert said in str(caught.value)
    flat = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double()
    with pytest.raises(DataError, match=r"one output per example, \(6,\).*two outputs.*cross-entropy"):
        evaluate(flat, Scenes(data.inputs, as_float), task=binary)


def test_class_255_of_images_counts() -> None:
    """Only pixels are ignored: ImageNet has an image class 255."""
    assert CLASSIFICATION.counted(torch.tensor([255, 1])) == 2
    assert SEGMENTATION.counted(torch.tensor([255, 1])) == 1


def test_training_counts_images_as_examples_and_pixels_for_accuracy() -> None:
    logits, targets = pixels()
    model = scaling()
    settings = LocalTraining(learning_rate=LearningRate(0.1), local_epochs=1, batch_size=0)
    result = train(
        model,
        Scenes(logits, targets),
        settings,
        learning_rate=0.1,
        stream=lambda _: torch.Generator(),
        task=SEGMENTATION,
    )
    assert (result.num_processed, result.num_steps) == (5, 1)
    assert result.loss == pytest.approx(pixel_cross_entropy(logits, targets).item(), rel=1e-12)
    assert result.accuracy == (logits.argmax(1) == targets).sum().item() / (targets != 255).sum().item()

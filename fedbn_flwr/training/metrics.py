"""The metrics of a test.

Mean IoU and Dice are computed from counts, the others from all outputs. A metric that
is not defined is NaN.

scikit-learn is imported when a metric is computed, because the first import takes a
second or two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr.errors import needs_package

__all__ = [
    "accuracy",
    "confusion",
    "dice",
    "mean_iou",
    "of_classes",
    "of_counts",
    "of_labels",
    "of_numbers",
]

_NAN = float("nan")


def accuracy(correct: float, counted: float) -> float:
    """Return the share of correct targets among the targets that count.

    The accuracy of a training, a test and single predictions is computed here. It is
    NaN if no target counts.
    """
    return correct / counted if counted else _NAN


def confusion(outputs: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """Return the confusion matrix, int64 (classes, classes).

    Entry (i, j) is the number of targets of class i that were classified as class j.

    Args:
        outputs: logits (B, classes, ...).
        targets: classes, int64 (B, ...).
        ignore: targets with this value are left out.
    """
    classes = outputs.shape[1]
    kept = targets != ignore
    cells = classes * targets[kept] + outputs.argmax(1)[kept]
    return torch.bincount(cells, minlength=classes**2).view(classes, classes)


def of_counts(counts: Tensor) -> dict[str, float]:
    """Return the metrics of a segmentation, from the confusion matrix of a test set."""
    share = accuracy(int(counts.trace()), int(counts.sum()))
    return {"accuracy": share, "miou": mean_iou(counts), "dice": dice(counts)}


def mean_iou(counts: Tensor) -> float:
    """Return the mean IoU over classes, from the confusion matrix of a test set.

    IoU is intersection / union. As in Cityscapes' own evaluation, classes that are
    neither in the targets nor in the predictions are left out. The result is NaN if no
    class is left.
    """
    counts = counts.double()
    intersection = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - intersection
    return float((intersection / union)[union > 0].mean())


def dice(counts: Tensor) -> float:
    """Return the mean Dice score over classes, from a test set's confusion matrix.

    Dice is 2 intersection / (targets + predictions). The classes are chosen as in
    ``mean_iou``, and a background class counts like the others.
    """
    counts = counts.double()
    intersection, both = counts.diagonal(), counts.sum(0) + counts.sum(1)
    return float((2 * intersection / both)[both > 0].mean())


def of_classes(
    names: Iterable[str], logits: Tensor, targets: Tensor
) -> dict[str, float]:
    """Return metrics of a classification.

    Args:
        names: ``balanced-accuracy``: mean recall over the classes with targets.
            ``macro-f1``: mean F1 over the classes with targets or predictions.
            ``auroc``, ``auprc``: mean over the classes with targets, each against the
            others.
        logits: float64 (N, classes).
        targets: int64 (N,), each in 0..classes-1.
    """
    y_true = F.one_hot(targets, logits.shape[1])
    y_pred = F.one_hot(logits.argmax(1), logits.shape[1])
    # Use log-probabilities, because probabilities are equal for all large logits.
    return _over_columns(_recall, names, logits.log_softmax(1), y_pred, y_true)


def of_labels(
    names: Iterable[str], logits: Tensor, targets: Tensor
) -> dict[str, float]:
    """Return metrics of labels, decided at logit 0.

    With several labels, a metric is the mean over the labels with a defined value.

    Args:
        names: ``balanced-accuracy``: mean of the recalls of yes and no; if one of them
            does not occur, the recall of the other. ``f1``, ``macro-f1``, ``auroc``,
            ``auprc``: the metric of the class yes.
        logits: float64 (N, labels).
        targets: float64 (N, labels), 0, 1 or NaN (unknown).
    """
    return _over_columns(_mean_recall, names, logits, (logits > 0).long(), targets)


def of_numbers(
    names: Iterable[str], outputs: Tensor, targets: Tensor
) -> dict[str, float]:
    """Return metrics of a regression.

    Args:
        names: ``mae``: mean absolute error over all known targets. ``rmse``: root of
            their mean squared error. ``r2``: coefficient of determination, the mean
            over the columns with two different targets. All are NaN if an output is
            infinite or NaN.
        outputs: float64 (N, columns).
        targets: float64 (N, columns), NaN if unknown.
    """
    if not outputs.isfinite().all():  # scikit-learn refuses non-finite values
        return dict.fromkeys(names, _NAN)
    metrics: dict[str, Callable[[Tensor, Tensor], float]] = {
        "mae": _mae,
        "rmse": _rmse,
        "r2": _mean_r2,
    }
    return {name: metrics[name](outputs, targets) for name in names}


def _mae(outputs: Tensor, targets: Tensor) -> float:
    known = ~targets.isnan()
    if not known.any():
        return _NAN
    return float(_sklearn().mean_absolute_error(targets[known], outputs[known]))


def _rmse(outputs: Tensor, targets: Tensor) -> float:
    known = ~targets.isnan()
    return float((targets[known] - outputs[known]).square().mean().sqrt())


def _mean_r2(outputs: Tensor, targets: Tensor) -> float:
    values = []
    for column, rows in enumerate((~targets.isnan()).T):
        y_true, y_pred = targets[rows, column], outputs[rows, column]
        # Skip equal targets, because they have no variance that could be explained.
        if bool((y_true != y_true[:1]).any()):
            values.append(float(_sklearn().r2_score(y_true, y_pred)))
    return _mean(values)


_OfColumn = Callable[[Tensor, Tensor, Tensor], float]
"""A metric of scores, y_pred and y_true, each (n,)."""


def _over_columns(
    balanced_accuracy: _OfColumn,
    names: Iterable[str],
    scores: Tensor,
    y_pred: Tensor,
    y_true: Tensor,
) -> dict[str, float]:
    """Return the mean of each metric over the columns with a defined value.

    All values are NaN if a score is NaN.
    """
    # Return NaN, because ranks and the largest value are meaningless with NaN.
    if scores.isnan().any():
        return dict.fromkeys(names, _NAN)
    columns = []
    for index, known in enumerate(~y_true.T.isnan()):
        columns.append(
            (scores[known, index], y_pred[known, index], y_true[known, index].long())
        )
    of_column = {**_OF_COLUMN, "balanced-accuracy": balanced_accuracy}
    metrics = {}
    for name in names:
        metrics[name] = _mean([of_column[name](*column) for column in columns])
    return metrics


def _sklearn() -> Any:
    with needs_package("scikit-learn", "the metrics auprc, mae and r2"):
        import sklearn.metrics
    return sklearn.metrics


def _mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN, or NaN without such values."""
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else _NAN


def _recall(_: Tensor, y_pred: Tensor, y_true: Tensor) -> float:
    return accuracy(int((y_true & y_pred).sum()), int(y_true.sum()))


def _mean_recall(scores: Tensor, y_pred: Tensor, y_true: Tensor) -> float:
    of_yes = _recall(scores, y_pred, y_true)
    of_no = _recall(scores, 1 - y_pred, 1 - y_true)
    return _mean([of_yes, of_no])


def _f1(_: Tensor, y_pred: Tensor, y_true: Tensor) -> float:
    # Counts are exact. An interval needs 400 values for each class and site, and
    # scikit-learn's function takes a millisecond.
    hits, either = int((y_true & y_pred).sum()), int(y_true.sum() + y_pred.sum())
    return accuracy(2 * hits, either)


def _auroc(scores: Tensor, _y_pred: Tensor, y_true: Tensor) -> float:
    positives = int(y_true.sum())
    negatives = len(y_true) - positives
    # Both classes must occur, because the metric compares examples of both.
    if not positives or not negatives:
        return _NAN
    # AUROC is Mann and Whitney's U, the sum of the positives' mean ranks, as a share of
    # all pairs. It is much faster than the area under a curve, and an interval needs a
    # thousand of them.
    _, place, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0) - (counts - 1).double() / 2
    of_positives = float(ranks[place[y_true.bool()]].sum())
    u = of_positives - positives * (positives + 1) / 2
    return u / (positives * negatives)


def _auprc(scores: Tensor, _y_pred: Tensor, y_true: Tensor) -> float:
    if not y_true.any():
        return _NAN
    # Use ranks, because scikit-learn refuses infinite scores. Equal scores have equal
    # ranks.
    _, ranks = torch.unique(scores, return_inverse=True)
    return float(_sklearn().average_precision_score(y_true, ranks))


_OF_COLUMN: dict[str, _OfColumn] = {
    "f1": _f1,
    "macro-f1": _f1,
    "auroc": _auroc,
    "auprc": _auprc,
}

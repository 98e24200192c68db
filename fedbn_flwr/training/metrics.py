"""The metrics of a test: mean IoU and Dice from counts, the others from all outputs. NaN where one is not defined.

scikit-learn is imported when a metric is computed, which takes a second or two the first time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr.errors import needs_package

__all__ = ["AT", "BINS", "calibration_error", "confusion", "dice", "mean_iou", "of_classes", "of_labels", "of_numbers"]

_NAN = float("nan")
_ROUNDING = 1e-9  # 1 - 2/20 is just below the specificity 0.9
AT = ("sensitivity-at-specificity", "specificity-at-sensitivity")
"""The metrics with a bound, such as ``sensitivity-at-specificity:0.9``."""
BINS = 15
"""The bins of equal width of the expected calibration error, as in Guo et al. 2017 (arXiv:1706.04599)."""


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


def dice(counts: Tensor) -> float:
    """Return the mean over classes of 2 intersection / (targets + predictions), from the same confusion matrix.

    The classes are those of ``mean_iou``: a background class counts as the others do.
    """
    counts = counts.double()
    intersection, both = counts.diagonal(), counts.sum(0) + counts.sum(1)
    return float((2 * intersection / both)[both > 0].mean())


def calibration_error(confidences: Tensor, right: Tensor) -> float:
    """Return the expected calibration error: the mean over the examples of |confidence - share| of their bin.

    Args:
        confidences: float64 (N,) in [0, 1]; they fall into ``BINS`` bins of equal width, 1 into the last one.
        right: what they are the probabilities of, (N,), 0 or 1.
    """
    bins = (confidences * BINS).long().clamp_(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, confidences - right)
    return float(gaps.abs().sum() / len(right)) if len(right) else _NAN


def of_classes(names: Iterable[str], logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Return metrics of a classification.

    Args:
        names: ``balanced-accuracy``: mean recall over the classes with targets. ``macro-f1``: mean F1 over the classes
            with targets or predictions. ``auroc``, ``auprc``, ``sensitivity-at-specificity:S`` and
            ``specificity-at-sensitivity:S`` (see ``of_labels``): mean over the classes with targets, each against the
            others. ``brier``: mean over the examples of the squared error of the probabilities, summed over the
            classes, and halved where these are two. ``ece``: ``calibration_error`` of the probability of the predicted
            class.
        logits: float64 (N, classes).
        targets: int64 (N,), each in 0..classes-1.
    """
    wanted = list(names)
    y_true, y_pred = F.one_hot(targets, logits.shape[1]), F.one_hot(logits.argmax(1), logits.shape[1])
    columns = [name for name in wanted if name not in _OF_PROBABILITIES]
    # Not the probabilities, which are equal for all large logits.
    values = _over_columns({"balanced-accuracy": _recall}, columns, logits.log_softmax(1), y_pred, y_true)
    for name in {*wanted}.intersection(_OF_PROBABILITIES):
        usable = len(targets) and logits.isfinite().all()
        values[name] = _OF_PROBABILITIES[name](logits.softmax(1), targets) if usable else _NAN
    return {name: values[name] for name in wanted}


def of_labels(names: Iterable[str], logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Return metrics of yes or no, decided at logit 0; with several labels the mean over those that define it.

    Args:
        names: ``balanced-accuracy``: mean of the recalls of yes and no, of those present. ``f1``, ``macro-f1``,
            ``auroc``, ``auprc``: of yes. ``sensitivity-at-specificity:S``: the highest sensitivity of a threshold with
            at least the specificity S on these examples, and ``specificity-at-sensitivity:S`` the other way round.
            ``brier``: mean of (probability of yes - label)^2, ``ece``: ``calibration_error`` of that probability.
        logits: float64 (N, labels).
        targets: float64 (N, labels), 0, 1 or NaN (unknown).
    """
    of_task: dict[str, _OfColumn] = {"balanced-accuracy": _mean_recall, "brier": _brier, "ece": _calibration}
    return _over_columns(of_task, names, logits, (logits > 0).long(), targets)


def of_numbers(names: Iterable[str], outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Return metrics of a regression.

    Args:
        names: ``mae``: mean absolute error over all known targets. ``rmse``: root of their mean squared error. ``r2``:
            coefficient of determination, the mean over the columns with two different targets. All are NaN if an output
            is infinite or NaN.
        outputs: float64 (N, columns).
        targets: float64 (N, columns), NaN = unknown.
    """
    known = ~targets.isnan()
    if not outputs.isfinite().all():
        return dict.fromkeys(names, _NAN)
    metrics = {
        "mae": lambda: float(_sklearn().mean_absolute_error(targets[known], outputs[known])) if known.any() else _NAN,
        "rmse": lambda: float((targets[known] - outputs[known]).square().mean().sqrt()),
        "r2": lambda: _mean(_r2(outputs[rows, i], targets[rows, i]) for i, rows in enumerate(known.T)),
    }
    return {name: metrics[name]() for name in names}


_OfColumn = Callable[[Tensor, Tensor, Tensor], float]
"""A metric of scores, y_pred and y_true, each (n,)."""


def _over_columns(
    of_task: dict[str, _OfColumn], names: Iterable[str], scores: Tensor, y_pred: Tensor, y_true: Tensor
) -> dict[str, float]:
    """Return for each name its mean over the columns where it is defined; NaN if a score is NaN."""
    if scores.isnan().any():
        return dict.fromkeys(names, _NAN)
    columns = []
    for index, known in enumerate(~y_true.T.isnan()):
        columns.append((scores[known, index], y_pred[known, index], y_true[known, index].long()))
    metrics = {**_OF_COLUMN, **of_task}
    values = {}
    for name in names:
        base, _, bound = name.partition(":")
        metric = functools.partial(_at, base, float(bound)) if base in AT else metrics[name]
        values[name] = _mean(itertools.starmap(metric, columns))
    return values


def _sklearn() -> Any:
    with needs_package("scikit-learn", "metrics other than loss, accuracy and mean IoU"):
        import sklearn.metrics
    return sklearn.metrics


def _mean(values: Iterable[float]) -> float:
    defined = [value for value in values if value == value]
    return sum(defined) / len(defined) if defined else _NAN


def _recall(_: Tensor, y_pred: Tensor, y_true: Tensor) -> float:
    return float(_sklearn().recall_score(y_true, y_pred)) if y_true.any() else _NAN


def _mean_recall(scores: Tensor, y_pred: Tensor, y_true: Tensor) -> float:
    return _mean((_recall(scores, y_pred, y_true), _recall(scores, 1 - y_pred, 1 - y_true)))


def _f1(_: Tensor, y_pred: Tensor, y_true: Tensor) -> float:
    return float(_sklearn().f1_score(y_true, y_pred)) if (y_true | y_pred).any() else _NAN


def _auroc(scores: Tensor, _: Tensor, y_true: Tensor) -> float:
    return float(_sklearn().roc_auc_score(y_true, _ranks(scores))) if 0 < y_true.sum() < len(y_true) else _NAN


def _auprc(scores: Tensor, _: Tensor, y_true: Tensor) -> float:
    return float(_sklearn().average_precision_score(y_true, _ranks(scores))) if y_true.any() else _NAN


def _at(name: str, bound: float, scores: Tensor, _: Tensor, y_true: Tensor) -> float:
    """Return the best sensitivity or specificity of the thresholds whose other one is at least ``bound``."""
    if not 0 < y_true.sum() < len(y_true):
        return _NAN
    false, true, _thresholds = _sklearn().roc_curve(y_true, _ranks(scores), drop_intermediate=False)
    sensitivity, specificity = torch.as_tensor(true), 1 - torch.as_tensor(false)
    wanted, stated = (sensitivity, specificity) if name == AT[0] else (specificity, sensitivity)
    return float(wanted[stated >= bound - _ROUNDING].max())


def _brier_of_classes(probabilities: Tensor, targets: Tensor) -> float:
    return float(_sklearn().brier_score_loss(targets, probabilities, labels=range(probabilities.shape[1])))


def _calibration_of_classes(probabilities: Tensor, targets: Tensor) -> float:
    confidences, predicted = probabilities.max(1)
    return calibration_error(confidences, (predicted == targets).double())


_OF_PROBABILITIES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "brier": _brier_of_classes,
    "ece": _calibration_of_classes,
}


def _brier(scores: Tensor, _: Tensor, y_true: Tensor) -> float:
    return float(_sklearn().brier_score_loss(y_true, scores.sigmoid())) if len(y_true) else _NAN


def _calibration(scores: Tensor, _: Tensor, y_true: Tensor) -> float:
    return calibration_error(scores.sigmoid(), y_true.double())


_OF_COLUMN: dict[str, _OfColumn] = {"f1": _f1, "macro-f1": _f1, "auroc": _auroc, "auprc": _auprc}


def _ranks(scores: Tensor) -> Tensor:
    """Return the ranks of the scores, equal for equal ones: scikit-learn refuses infinite scores."""
    ranks: Tensor = torch.unique(scores, return_inverse=True)[1]
    return ranks


def _r2(outputs: Tensor, targets: Tensor) -> float:
    return float(_sklearn().r2_score(targets, outputs)) if bool((targets != targets[:1]).any()) else _NAN

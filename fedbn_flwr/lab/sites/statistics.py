"""A metric of one site as a function of how often each of its groups (patients) counts.

A bootstrap sample counts a patient several times or not at all, a jackknife leaves one out: both are weights of groups,
and every metric here is computed for many of them at once. With the weights 1 it is the metric of ``training.metrics``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbn_flwr.training.metrics import AT, BINS
from fedbn_flwr.training.tasks import LabelTask, RegressionTask, Task

__all__ = ["Difference", "Floats", "MeanOf", "OfRanks", "OfSums", "Statistic", "statistic"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_ROUNDING = 1e-9  # as in ``training.metrics``
_AT_ONCE = 2**21  # numbers of one block of weights by rows


class Statistic(Protocol):
    """A metric of G groups."""

    @property
    def num_groups(self) -> int:
        """The number of groups, G."""

    def at(self, weights: Floats) -> Floats:
        """Return the metric (B,) for weights (B, G), each at least 0; NaN where it is not defined."""


@dataclass(frozen=True)
class OfSums:
    """A function of sums over the examples: a share, a mean error, a confusion matrix.

    Attributes:
        sums: of each group, (G, K).
        of: makes the metric (B,) of sums over all groups (B, K).
    """

    sums: Floats
    of: Callable[[Floats], Floats]

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return len(self.sums)

    def at(self, weights: Floats) -> Floats:
        """Return the metric (B,) for weights (B, G)."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.of(weights @ self.sums)


class OfRanks:
    """A function of the ROC curve of scores.

    Args:
        scores: of each row, (N,); the higher, the more it is a yes.
        truth: whether it is a yes, bool (N,).
        groups: the group of each row, int (N,).
        num_groups: G.
        of: makes the metric (B,) of the numbers of yes (B, T) and of no (B, T) at or above each of T thresholds, from
            the highest to the lowest.
    """

    def __init__(
        self,
        scores: Floats,
        truth: npt.NDArray[np.bool_],
        groups: Indices,
        num_groups: int,
        of: Callable[[Floats, Floats], Floats],
    ) -> None:
        order = np.argsort(-scores, kind="stable")
        self._last_of_equal = np.flatnonzero(np.diff(scores[order], append=np.nan))
        self._truth, self._groups = truth[order], groups[order]
        self._num_groups, self._of = num_groups, of

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return self._num_groups

    def at(self, weights: Floats) -> Floats:
        """Return the metric (B,) for weights (B, G)."""
        block = max(1, _AT_ONCE // max(1, len(self._groups)))
        parts = [self._at(weights[start : start + block]) for start in range(0, len(weights), block)]
        return np.concatenate(parts)

    def _at(self, weights: Floats) -> Floats:
        rows = weights[:, self._groups]
        above = np.cumsum(rows, 1)[:, self._last_of_equal]
        yes = np.cumsum(rows * self._truth, 1)[:, self._last_of_equal]
        if not yes.shape[1]:
            return np.full(len(weights), np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            return self._of(yes, above - yes)


@dataclass(frozen=True)
class MeanOf:
    """The mean of several metrics of the same groups, over those that are defined."""

    parts: Sequence[Statistic]

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return self.parts[0].num_groups

    def at(self, weights: Floats) -> Floats:
        """Return the mean (B,) for weights (B, G)."""
        values = np.stack([part.at(weights) for part in self.parts])
        known = ~np.isnan(values)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.where(known, values, 0).sum(0) / known.sum(0))


@dataclass(frozen=True)
class Difference:
    """One metric minus another one of the same groups."""

    one: Statistic
    other: Statistic

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return self.one.num_groups

    def at(self, weights: Floats) -> Floats:
        """Return the difference (B,) for weights (B, G)."""
        return self.one.at(weights) - self.other.at(weights)


def statistic(metric: str, task: Task, outputs: Tensor, targets: Tensor, groups: Indices, num_groups: int) -> Statistic:
    """Return a metric of a test as a function of its groups' weights.

    Args:
        metric: one of ``task.allowed``, or "loss".
        task: the learning task.
        outputs: of each example, (N, ...); of a segmentation its confusion matrix (N, classes, classes) in their place;
            for "loss" the summed loss of each example and its number of targets, (N, 2).
        targets: (N, ...).
        groups: the group of each example, 0..num_groups - 1, int (N,).
        num_groups: G.
    """
    summed = functools.partial(_sums, groups=groups, num_groups=num_groups)
    values, labels = outputs.double().numpy().reshape(len(outputs), -1), targets.numpy()
    if metric == "loss":
        return OfSums(summed(values), _share)
    if task.by_pixel:
        return OfSums(summed(values), _OF_CONFUSION[metric])
    ranked = functools.partial(_ranked, metric, num_groups=num_groups)
    if isinstance(task, (LabelTask, RegressionTask)):
        truth = targets.double().numpy().reshape(len(values), -1)
        columns = [~np.isnan(column) for column in truth.T]
        if isinstance(task, RegressionTask):
            if metric in ("mae", "rmse"):
                return OfSums(summed(_errors(metric, values, truth)), _rmse if metric == "rmse" else _share)
            return MeanOf([OfSums(summed(_squares(values[:, k], truth[:, k])), _r2) for k in range(len(columns))])
        if metric == "accuracy":
            known = ~np.isnan(truth)
            right = ((values > 0) == (truth > 0)) & known
            return OfSums(summed(np.stack([right.sum(1), known.sum(1)], 1)), _share)
        parts: list[Statistic] = []
        for k, known in enumerate(columns):
            if _is_ranked(metric):
                parts.append(ranked(values[known, k], truth[known, k] == 1, groups[known]))
            else:
                sums, of = _of_yes_and_no(metric, values[:, k], truth[:, k])
                parts.append(OfSums(summed(sums), of))
        return MeanOf(parts)
    kept = labels != task.ignore
    values, labels, groups = values[kept], labels[kept], groups[kept]
    summed = functools.partial(_sums, groups=groups, num_groups=num_groups)
    chances = outputs[kept].double().log_softmax(1).numpy()
    if _is_ranked(metric):
        ranked_classes = [ranked(chances[:, c], labels == c, groups) for c in np.unique(labels)]
        return MeanOf(ranked_classes or [ranked(chances[:, 0], labels == 0, groups)])
    predicted = values.argmax(1)
    if metric in ("brier", "ece"):
        probabilities = np.exp(chances)
        truth = np.eye(values.shape[1])[labels]
        if metric == "ece":
            return OfSums(summed(_gaps(probabilities.max(1), predicted == labels)), _ece)
        halves = 2 if values.shape[1] == 2 else 1
        errors = ((probabilities - truth) ** 2).sum(1) / halves
        return OfSums(summed(np.stack([errors, np.ones(len(errors))], 1)), _share)
    if metric == "accuracy":
        return OfSums(summed(np.stack([predicted == labels, np.ones(len(labels))], 1)), _share)
    classes = values.shape[1]
    cells = np.zeros((num_groups, classes * classes))
    np.add.at(cells, (groups, classes * labels + predicted), 1.0)
    return OfSums(cells, _OF_CONFUSION[metric])


def _sums(of_rows: npt.NDArray[np.generic], groups: Indices, num_groups: int) -> Floats:
    """Return the sums over the rows of each group, (num_groups, K), of (N, K)."""
    sums = np.zeros((num_groups, of_rows.shape[1]))
    np.add.at(sums, groups, of_rows.astype(np.float64))
    return sums


def _share(sums: Floats) -> Floats:
    return np.asarray(sums[:, 0] / sums[:, 1])


def _rmse(sums: Floats) -> Floats:
    return np.asarray(np.sqrt(_share(sums)))


def _errors(metric: str, values: Floats, truth: Floats) -> Floats:
    errors = np.abs(values - truth) if metric == "mae" else (values - truth) ** 2
    return np.stack([np.nansum(errors, 1), (~np.isnan(truth)).sum(1)], 1)


def _squares(values: Floats, truth: Floats) -> Floats:
    """Return the squared error, the target, its square and 1, and 0 where the target is unknown, (N, 4)."""
    centred = truth - np.nanmean(truth) if (~np.isnan(truth)).any() else truth  # else large targets cancel
    columns = np.stack([(values - truth) ** 2, centred, centred**2, ~np.isnan(truth)], 1)
    return np.asarray(np.nan_to_num(columns, nan=0.0))


def _r2(sums: Floats) -> Floats:
    errors, total, squares, count = sums.T
    spread = squares - total**2 / count
    return np.asarray(np.where(spread > 1e-12 * squares, 1 - errors / spread, np.nan))


def _of_yes_and_no(metric: str, logits: Floats, truth: Floats) -> tuple[Floats, Callable[[Floats], Floats]]:
    """Return what a metric of one label sums over rows with a known label, and the metric of the sums."""
    known = ~np.isnan(truth)
    yes, told = known & (truth == 1), known & (logits > 0)
    if metric in ("brier", "ece"):
        probabilities = torch.from_numpy(logits).sigmoid().numpy()  # without an overflow
        if metric == "brier":
            return np.stack([np.where(known, (probabilities - yes) ** 2, 0), known], 1), _share
        gaps = _gaps(probabilities, yes)
        gaps[~known] = 0
        return gaps, _ece
    cells = np.stack([known & ~yes & ~told, known & ~yes & told, yes & ~told, yes & told], 1)
    return cells.astype(np.float64), _f1_of_yes if metric in ("f1", "macro-f1") else _OF_CONFUSION[metric]


def _gaps(confidences: Floats, right: npt.NDArray[np.bool_]) -> Floats:
    """Return confidence - right in the column of its bin, and 1 in the last column, (N, BINS + 1)."""
    bins = np.minimum((confidences * BINS).astype(np.int64), BINS - 1)
    gaps = np.zeros((len(bins), BINS + 1))
    gaps[np.arange(len(bins)), bins] = confidences - right
    gaps[:, -1] = 1
    return gaps


def _ece(sums: Floats) -> Floats:
    return np.asarray(np.abs(sums[:, :-1]).sum(1) / sums[:, -1])


def _over_classes(per_class: Callable[[Floats, Floats, Floats], tuple[Floats, Floats]]) -> Callable[[Floats], Floats]:
    """Return the mean over the classes with a divisor above 0, of a quotient of (right, targets, predictions)."""

    def metric(sums: Floats) -> Floats:
        classes = round(sums.shape[1] ** 0.5)
        counts = sums.reshape(-1, classes, classes)
        above, below = per_class(np.diagonal(counts, axis1=1, axis2=2), counts.sum(2), counts.sum(1))
        some = below > _ROUNDING
        return np.asarray(np.where(some, above / np.where(some, below, 1), 0).sum(1) / some.sum(1))

    return metric


def _accuracy(sums: Floats) -> Floats:
    classes = round(sums.shape[1] ** 0.5)
    return np.asarray(sums[:, :: classes + 1].sum(1) / sums.sum(1))


def _f1_of_yes(sums: Floats) -> Floats:
    return np.asarray(2 * sums[:, 3] / (sums[:, 1] + sums[:, 2] + 2 * sums[:, 3]))


_OF_CONFUSION: dict[str, Callable[[Floats], Floats]] = {
    "accuracy": _accuracy,
    "balanced-accuracy": _over_classes(lambda right, true, told: (right, true)),
    "macro-f1": _over_classes(lambda right, true, told: (2 * right, true + told)),
    "dice": _over_classes(lambda right, true, told: (2 * right, true + told)),
    "miou": _over_classes(lambda right, true, told: (right, true + told - right)),
}


def _is_ranked(metric: str) -> bool:
    return metric in ("auroc", "auprc") or metric.partition(":")[0] in AT


def _ranked(metric: str, scores: Floats, truth: npt.NDArray[np.bool_], groups: Indices, num_groups: int) -> OfRanks:
    base, _, bound = metric.partition(":")
    curves: dict[str, Callable[[Floats, Floats], Floats]] = {"auroc": _auroc, "auprc": _auprc}
    of = curves.get(base) or functools.partial(_at, base, float(bound))
    return OfRanks(scores, truth, groups, num_groups, of)


def _auroc(yes: Floats, no: Floats) -> Floats:
    steps = np.diff(no, axis=1, prepend=0)
    middle = yes - np.diff(yes, axis=1, prepend=0) / 2
    return np.asarray((steps * middle).sum(1) / (yes[:, -1] * no[:, -1]))


def _auprc(yes: Floats, no: Floats) -> Floats:
    above = yes + no
    precision = np.where(above > 0, yes / above, 0)
    return np.asarray((np.diff(yes, axis=1, prepend=0) * precision).sum(1) / yes[:, -1])


def _at(name: str, bound: float, yes: Floats, no: Floats) -> Floats:
    """Return the best sensitivity (specificity) of the thresholds whose specificity (sensitivity) is at least bound."""
    start = np.zeros((len(yes), 1))
    sensitivity = np.concatenate([start, yes / yes[:, -1:]], 1)
    specificity = 1 - np.concatenate([start, no / no[:, -1:]], 1)
    wanted, stated = (sensitivity, specificity) if name == AT[0] else (specificity, sensitivity)
    best = np.where(stated >= bound - _ROUNDING, wanted, -np.inf).max(1)
    return np.where(np.isfinite(best), best, np.nan)

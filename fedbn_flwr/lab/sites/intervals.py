"""Confidence intervals of a site's metric, and of its difference to another model's on the same examples.

Groups (patients) are the independent units: a group's examples are left out together. The variance is the jackknife's
over groups. For AUROC with one row a group it is DeLong's (1988) to a factor of (G - 1) / G and n / (n - 1) in each
class, and with several rows that of clustered data (Obuchowski 1997).

The interval of a share is Wilson's (1927), score / effective number of groups: it stays within 0 and 1, and has a width
where all is right. ``benchmarks/site_intervals.py`` measures its coverage beside the bootstrap's, and from how many
groups on it holds: below them there is no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbn_flwr.lab.sites.statistics import Difference, Floats, Indices, Statistic
from fedbn_flwr.training.metrics import AT

__all__ = [
    "FEWEST_GROUPS",
    "LEVEL",
    "Classes",
    "Estimate",
    "Gap",
    "difference",
    "estimate",
    "fewest_of_a_class",
    "holm",
    "mcnemar",
    "needed_for",
]

LEVEL = 0.95
FEWEST_GROUPS = 10
"""Groups from which on there is an interval."""
_POWER = 0.8
_POSITIVE = ("loss", "mae", "rmse", "brier")
_PLAIN = ("accuracy", "loss", "mae", "rmse", "r2", "brier", "ece")  # means over examples, whatever their class


def fewest_of_a_class(metric: str) -> int:
    """Return how many groups of the rarest class an interval of this metric needs; 0 = the classes do not matter."""
    if metric in _PLAIN:
        return 0
    return 12 if metric.partition(":")[0] in AT else 6


@dataclass(frozen=True)
class Classes:
    """The classes of a site's groups.

    Attributes:
        pattern: a number for each set of classes that a group's examples have, int (G,).
        fewest: the number of groups that have the rarest class; 0 if only one class is there.
    """

    pattern: Indices
    fewest: int


@dataclass(frozen=True)
class Estimate:
    """A metric of one site.

    Attributes:
        value: the metric; None = not defined.
        low: lower end of the interval; None = none can be given.
        high: upper end.
        reason: why there is no interval; "" if there is one.
        needed: about how many groups an interval needs; None = no number of them helps by itself.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    needed: int | None = None


@dataclass(frozen=True)
class Gap:
    """The metric of a model minus that of another one on the same examples.

    Attributes:
        difference: None = one of them is not defined.
        low: lower end of its interval; None = none can be given.
        high: upper end.
        p: two-sided p of no difference; None = there is neither an interval nor another test.
        needed: about how many groups would show a difference of this size with a power of 80 %; None = unknown.
    """

    difference: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    needed: int | None = None


def estimate(metric: str, of_groups: Statistic, classes: Classes, num_groups: int) -> Estimate:
    """Return the metric with its interval.

    Args:
        metric: its name.
        of_groups: the metric as a function of the weights of blocks of groups.
        classes: those of the blocks; ``fewest`` counts groups.
        num_groups: the number of groups.
    """
    value, left_out = _jackknife(of_groups)
    if not math.isfinite(value):
        one_class = fewest_of_a_class(metric) and not classes.fewest
        return Estimate(None, reason="all of one class" if one_class else "not defined")
    if needed := _too_few(metric, classes, num_groups):
        return Estimate(value, reason="too few", needed=needed)
    if not np.isfinite(left_out).all():
        return Estimate(value, reason="one group decides whether it is defined")
    deviations = _deviations(left_out)
    freedom = _freedom(metric, deviations, classes)
    variance, fewest = float(deviations.sum()), classes.fewest if fewest_of_a_class(metric) else num_groups
    if metric == "r2":
        half = _t(freedom) * math.sqrt(variance)
        return Estimate(value, value - half, min(1.0, value + half))
    if metric in _POSITIVE:  # on the scale of the logarithm, which keeps it above 0
        if value <= 0 or variance == 0:
            return Estimate(value, reason="the errors do not vary")
        factor = math.exp(_t(freedom) * math.sqrt(variance) / value)
        return Estimate(value, value / factor, value * factor)
    return Estimate(value, *_wilson(value, variance, freedom, fewest))


def difference(
    metric: str, one: Statistic, other: Statistic, classes: Classes, num_groups: int, p: float | None = None
) -> Gap:
    """Return the difference of a metric, paired: each group is left out of both.

    Args:
        metric: its name.
        one: the metric of a model.
        other: that of the other one, on the same examples.
        classes: those of the blocks of groups.
        num_groups: the number of groups.
        p: of another test; None = that of the interval.
    """
    value, left_out = _jackknife(Difference(one, other))
    if not math.isfinite(value):
        return Gap(None)
    if _too_few(metric, classes, num_groups) or not np.isfinite(left_out).all():
        return Gap(value)
    deviations = _deviations(left_out)
    error, freedom = math.sqrt(deviations.sum()), _freedom(metric, deviations, classes)
    if error == 0:  # both predict the same, or all groups differ alike, which has no interval
        return Gap(value, p=p) if value else Gap(0.0, 0.0, 0.0, 1.0)
    half = _t(freedom) * error
    if p is None:
        from scipy.special import stdtr

        p = float(2 * stdtr(freedom, -abs(value) / error))
    return Gap(value, value - half, value + half, p, needed_for(value, error, num_groups))


def needed_for(value: float, error: float, num_groups: int) -> int | None:
    """Return about how many groups show a difference of this size with a power of 80 %, in two digits.

    None if there is no difference.
    """
    from scipy.special import ndtri

    if not value:
        return None
    exact = num_groups * ((ndtri((1 + LEVEL) / 2) + ndtri(_POWER)) * error / abs(value)) ** 2
    step = 10 ** max(0, math.floor(math.log10(max(exact, 1))) - 1)
    return int(math.ceil(exact / step) * step)


def mcnemar(only_one: int, only_other: int) -> float:
    """Return McNemar's (1947) exact two-sided p.

    Args:
        only_one: examples that the one model alone has right.
        only_other: those that the other one alone has right.
    """
    from scipy.special import bdtr

    total = only_one + only_other
    return float(min(1.0, 2 * bdtr(min(only_one, only_other), total, 0.5))) if total else 1.0


def holm(values: Sequence[float]) -> list[float]:
    """Return Holm's (1979) corrected p: the i-th smallest of m times m - i + 1, made monotone, at most 1."""
    corrected, largest = [0.0] * len(values), 0.0
    for rank, at in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, values[at] * (len(values) - rank)))
        corrected[at] = largest
    return corrected


def _jackknife(of_groups: Statistic) -> tuple[float, Floats]:
    """Return the metric, and the metric without each block of groups (G,)."""
    every = np.ones((1, of_groups.num_groups))
    return float(of_groups.at(every)[0]), of_groups.at(every - np.eye(of_groups.num_groups))


def _deviations(left_out: Floats) -> Floats:
    """Return the share of each block in the jackknife's variance (G,), which is their sum."""
    count = len(left_out)
    return np.asarray((count - 1) / count * (left_out - left_out.mean()) ** 2)


def _freedom(metric: str, deviations: Floats, classes: Classes) -> float:
    """Return the degrees of freedom of the variance: Satterthwaite's (1946) over the groups of each class."""
    total = float(deviations.sum())
    if not fewest_of_a_class(metric) or total == 0:
        return len(deviations) - 1
    parts = 0.0
    for pattern in np.unique(classes.pattern):
        of_class = deviations[classes.pattern == pattern]
        parts += of_class.sum() ** 2 / max(len(of_class) - 1, 1)
    return min(total**2 / parts, len(deviations) - 1)


def _too_few(metric: str, classes: Classes, num_groups: int) -> int:
    """Return about how many groups are needed if these are too few, else 0."""
    fewest = fewest_of_a_class(metric)
    needed = FEWEST_GROUPS
    if fewest:
        needed = max(needed, math.ceil(num_groups * fewest / max(classes.fewest, 1)))
    return needed if needed > num_groups else 0


def _t(freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def _wilson(share: float, variance: float, freedom: float, fewest: int) -> tuple[float, float]:
    """Return Wilson's interval of a share with as many examples as give its variance; ``fewest`` where there is none.

    The two ends are the shares whose distance from this one is t times their own standard error.
    """
    inside = 0 < share < 1 and variance > 0
    square, count = _t(freedom) ** 2, share * (1 - share) / variance if inside else fewest
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = math.sqrt(square * (share * (1 - share) / count + square / (4 * count**2))) / (1 + square / count)
    return max(0.0, centre - half), min(1.0, centre + half)

"""Numbers with intervals, from the single predictions of a site's test.

Predictions are written once, at the end of a run (see ``predictions``). No model and no
data are read again. There is one rule:

- The standard error of a site is the deviation of its metric over 400 bootstrap draws
  of its units: patients, or examples without patients. All examples of a unit are drawn
  together, and two runs see the same draws. The error is corrected for n - 1, where n
  counts the units, or the units with the rarer class if the metric needs two classes.
- The error of a mean over sites is the error of independent sites. A mean over seeds
  adds the variance over the seeds, so it covers other test examples and other seeds.
- The interval is the value ± t times its error, with Student's t, Welch's degrees of
  freedom, and the level 1 - 0.05 / k if k numbers are compared (Bonferroni).
- If all draws are equal, a share of n units is uncertain by 1 - 0.05^(1/n).
- A site with fewer than two units, with fewer than five units of the rarer class, or
  with more undefined draws than others has no interval, and its row has the reason. A
  mean, and the difference beside it, are over the sites that have intervals, if there
  are any. This holds in a run, in ``evaluate`` and in a study.
- A user's task has one value for each site, without an interval. The error of a mean
  over its sites is their standard deviation / sqrt(sites).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.results.predictions import SiteTest
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.tasks import TASKS, in_percent

ONE_VALUE = "a task of your own has one value for each site, not for each example"
LEVEL = 0.95
_RESAMPLES, _SEED = 400, 0
_MOST_SEEDS = 100
_ROUNDING = 1e-9


class Interval(NamedTuple):
    """A number with its standard error.

    Attributes:
        value: the number; None if it is undefined.
        error: its standard error; None without an interval.
        freedom: the degrees of freedom of the error.
        why: the reason why there is no interval.
        limits: the lowest and the highest possible number.
    """

    value: float | None = None
    error: float | None = None
    freedom: float = math.inf
    why: str = ""
    limits: tuple[float, float] = (-math.inf, math.inf)

    def ends(self, of: int = 1) -> tuple[float, float] | tuple[None, None]:
        """Return the ends of the interval, if ``of`` numbers are compared."""
        if self.value is None or self.error is None:
            return None, None
        # Import here, because SciPy takes long to import.
        from scipy import stats

        level = 1 - (1 - LEVEL) / 2 / of
        half = float(stats.t.ppf(level, self.freedom)) * self.error
        low, high = self.limits
        return max(self.value - half, low), min(self.value + half, high)

    def side(self, of: int = 1) -> int:
        """Return 1 or -1 if the interval is above or below 0, otherwise 0."""
        low, high = self.ends(of)
        if low is None or high is None:
            return 0
        return int(low > 0) - int(high < 0)


def interval(site: SiteTest) -> Interval:
    """Return the main metric of a site."""
    why, limits = why_none(site), range_of(site.task.score, 0)
    if why:
        known = site.value if math.isfinite(site.value) else None
        return Interval(known, why=why, limits=limits)
    if isinstance(site.task, OwnTask):
        return Interval(site.value, why=ONE_VALUE, limits=limits)
    return _of_draws(site, Interval(site.value, limits=limits), _draws(site))


def difference(one: SiteTest, other: SiteTest) -> Interval:
    """Return the metric of ``one`` minus the metric of ``other`` on the same examples."""
    why, limits = why_none(one) or why_none(other), range_of(one.task.score, -1)
    gap = one.value - other.value
    if why:
        return Interval(gap if math.isfinite(gap) else None, why=why, limits=limits)
    if isinstance(one.task, OwnTask):
        return Interval(gap, why=ONE_VALUE, limits=limits)
    return _of_draws(one, Interval(gap, limits=limits), _draws(one) - _draws(other))


def mean(found: Iterable[Interval]) -> Interval:
    """Return the mean over the sites with an interval, or over all if none has one."""
    known = [one for one in found if one.value is not None]
    kept = [one for one in known if one.error is not None]
    if not known:
        return Interval(why="no site has a value")
    values, limits = [float(one.value or 0) for one in kept or known], known[0].limits
    if kept:
        errors = [float(one.error or 0) / len(kept) for one in kept]
        return _welch(fmean(values), errors, [one.freedom for one in kept], limits)
    if known[0].why == ONE_VALUE and len(values) > 1:
        errors = [stdev(values) / len(values) ** 0.5]
        return _welch(fmean(values), errors, [len(values) - 1], limits)
    return Interval(fmean(values), why=known[0].why, limits=limits)


def over_seeds(found: Sequence[Interval]) -> Interval:
    """Return the mean over the seeds of a study.

    The interval covers other seeds. It also covers other test examples, if the number
    of each seed has an interval; with one seed, it covers nothing else. There is none
    if a seed has too few test examples.
    """
    known = [one for one in found if one.value is not None]
    if not known:
        return Interval(why="no seed has a value")
    values, limits = [float(one.value or 0) for one in known], known[0].limits
    for one in known:
        if one.why not in ("", ONE_VALUE):
            return Interval(fmean(values), why=one.why, limits=limits)
    if len(values) < 2:
        # As in ``evaluate``, one seed covers only other test examples.
        why = "" if known[0].error is not None else "one seed has no interval"
        return known[0]._replace(why=why)
    errors, freedom = [stdev(values) / len(values) ** 0.5], [len(values) - 1.0]
    within = within_seeds(known)
    if max(values) - min(values) <= _ROUNDING:
        if within.error is None:
            return Interval(fmean(values), why="equal with every seed", limits=limits)
        errors, freedom = [], []
    if within.error is not None:
        errors.append(within.error)
        freedom.append(within.freedom)
    return _welch(fmean(values), errors, freedom, limits)


def seeds_to_decide(found: Sequence[Interval], of: int) -> int:
    """Return how many seeds would decide a mean with this difference and spread.

    ``of`` numbers are compared. The result is 0 if seeds do not decide: with one seed
    their spread is unknown, and test examples may leave the difference open.
    """
    values = [float(one.value or 0) for one in found]
    within = within_seeds(found)
    if len(values) < 2 or any(one.why not in ("", ONE_VALUE) for one in found):
        return 0
    spread, value = stdev(values), fmean(values)
    for count in range(len(values) + 1, _MOST_SEEDS + 1):
        errors, freedom = [spread / count**0.5], [count - 1.0]
        if within.error is not None:
            errors.append(within.error)
            freedom.append(within.freedom)
        if _welch(value, errors, freedom, (-math.inf, math.inf)).side(of):
            return count
    return 0


def within_seeds(known: Sequence[Interval]) -> Interval:
    """Return the mean over seeds, with the error of the test examples only."""
    value, errors = fmean(float(one.value or 0) for one in known), []
    for one in known:
        if one.error is None:
            return Interval(value, why=one.why)
        errors.append(one.error**2)
    return Interval(value, fmean(errors) ** 0.5, min(one.freedom for one in known))


def _welch(
    value: float,
    errors: Sequence[float],
    freedom: Sequence[float],
    limits: tuple[float, float],
) -> Interval:
    """Return a sum of independent numbers with these errors."""
    variances = [error**2 for error in errors]
    total = math.fsum(variances)
    if not total:
        return Interval(value, why="all values are equal", limits=limits)
    shares = zip(variances, freedom, strict=True)
    inverse = math.fsum((one / total) ** 2 / count for one, count in shares)
    return Interval(value, total**0.5, 1 / inverse, "", limits)


def share(hits: Tensor, units: Indices) -> Interval:
    """Return a share of examples, given 1 or 0 and the unit of each."""
    if not len(hits):
        return Interval(why="no such examples")
    outputs = torch.stack([~hits, hits], 1).float()
    right = torch.ones(len(hits), dtype=torch.int64)
    return interval(SiteTest(TASKS["classification"], outputs, right, units))


def at_threshold(site: SiteTest, logit: float = 0.0) -> dict[str, Interval]:
    """Return the figures of a site with two classes, at a threshold of the logit."""
    kept = site.task.counting(site.targets).flatten()
    called = site.outputs[kept].flatten() > logit
    true = site.targets[kept].flatten() > 0
    most = true if 2 * int(true.sum()) > len(true) else ~true
    units = site.units[kept.numpy()]
    return {
        "accuracy": share(called == true, units),
        "base rate": share(most, units),
        "called positive": share(called, units),
        "sensitivity": share(called[true], units[true.numpy()]),
        "specificity": share(~called[~true], units[~true.numpy()]),
    }


@functools.lru_cache(maxsize=64)
def _draws(site: SiteTest) -> NDArray[np.float64]:
    """Return the metric over draws of the units, equal for tests of as many units."""
    unchecked: AbstractContextManager[None] = nullcontext()
    if site.task.score != "accuracy":
        # Import here, because accuracy does not need scikit-learn.
        import sklearn

        # The checks of many draws of the same examples would take longer than the
        # metrics.
        unchecked = sklearn.config_context(
            assume_finite=True, skip_parameter_validation=True
        )
    count, draw = len(site.groups), np.random.default_rng(_SEED)
    with np.errstate(all="ignore"), unchecked:
        chosen = (draw.integers(count, size=count) for _ in range(_RESAMPLES))
        return np.array([site.metric(units) for units in chosen])


def range_of(metric: str, lowest: int) -> tuple[float, float]:
    """Return the lowest and the highest value; a share is at least ``lowest``."""
    if in_percent(metric):
        return float(lowest), 1.0
    return -math.inf, math.inf


def why_none(site: SiteTest) -> str:
    """Return the reason why the examples of a site give no interval, or ""."""
    if not site.groups:
        return "no test examples"
    if isinstance(site.task, OwnTask):
        return "" if math.isfinite(site.value) else "its test does not define the score"
    if not site.outputs.isfinite().all():
        return (
            "the outputs are not finite: the training diverged, or inputs are too large"
        )
    if not math.isfinite(site.value):
        return "the test examples do not define the metric: one class, or none is known"
    return site.too_few


def _of_draws(site: SiteTest, plain: Interval, draws: NDArray[np.float64]) -> Interval:
    """Return a number of a site with the error of its draws."""
    units, freedom = site.deciding, len(site.groups) - 1
    defined = draws[np.isfinite(draws)]
    if len(defined) < len(draws) / 2:
        return plain._replace(why="more than half of the draws lack a class")
    error = defined.std() * (units / (units - 1)) ** 0.5
    if np.ptp(defined) <= _ROUNDING:
        if not in_percent(site.task.score):
            return plain._replace(why="all draws of the test examples are equal")
        from scipy import stats

        t = stats.t.ppf((1 + LEVEL) / 2, freedom)
        error = (1 - 0.05 ** (1 / units)) / t
    return plain._replace(error=float(error), freedom=freedom)

"""Every mean, difference and interval that a page, a table or a command shows.

They are computed from the single predictions that a run writes once, at its end (see
``site_tests``). No model and no data are read again. There is one rule:

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
  mean, and the difference beside it, are over the sites that have intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.files import read_json, site_label
from fedbn_flwr.lab.output.site_tests import BATCH, SiteTest, read_predictions
from fedbn_flwr.training.tasks import higher_is_better, in_percent

FEWEST = 5
"""The fewest units with the rarer class for an interval of a metric of classes."""
LEVEL = 0.95
_RESAMPLES, _SEED = 400, 0
_MANY = 20  # sites whose deviation gives an interval
_ROUNDING = 1e-9
_GAP = 0.1
"""By how much batch statistics must be better than running ones to be named: a share of
the examples, or of the error.
"""


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
    return _of_draws(site, site.value, _draws(site), 0)


def difference(one: SiteTest, other: SiteTest) -> Interval:
    """Return the metric of ``one`` minus the metric of ``other`` on the same examples."""
    draws = _draws(one) - _draws(other)
    return _of_draws(one, one.value - other.value, draws, -1)


def mean(found: Iterable[Interval]) -> Interval:
    """Return the mean over sites, of those with an interval if there are any."""
    known = [one for one in found if one.value is not None]
    kept = [one for one in known if one.error is not None]
    if not known:
        return Interval(why="no site has a value")
    values, limits = [float(one.value or 0) for one in kept or known], known[0].limits
    if kept:
        errors = [float(one.error or 0) / len(kept) for one in kept]
        return _welch(fmean(values), errors, [one.freedom for one in kept], limits)
    if len(values) > _MANY:
        # Many sites without an interval of their own are a sample of sites.
        error = stdev(values) / len(values) ** 0.5
        return Interval(fmean(values), error, len(values) - 1, "", limits)
    return Interval(fmean(values), why=known[0].why, limits=limits)


def over_seeds(found: Sequence[Interval]) -> Interval:
    """Return the mean over the seeds of a study.

    The interval covers other seeds. It also covers other test examples, if the number
    of each seed has an interval.
    """
    known = [one for one in found if one.value is not None]
    if not known:
        return Interval(why="no seed has a value")
    values, limits = [float(one.value or 0) for one in known], known[0].limits
    if len(values) < 2:
        return Interval(values[0], why="one seed has no interval", limits=limits)
    if max(values) - min(values) <= _ROUNDING:
        return Interval(fmean(values), why="equal with every seed", limits=limits)
    errors, freedom = [stdev(values) / len(values) ** 0.5], [len(values) - 1.0]
    within = [one.error for one in known if one.error is not None]
    if len(within) == len(known):
        errors.append(fmean(error**2 for error in within) ** 0.5)
        freedom.append(min(one.freedom for one in known))
    return _welch(fmean(values), errors, freedom, limits)


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
        return Interval(value, why="all draws are equal", limits=limits)
    shares = zip(variances, freedom, strict=True)
    inverse = math.fsum((one / total) ** 2 / count for one, count in shares)
    return Interval(value, total**0.5, 1 / inverse, "", limits)


def tests_of(run: Path, part: str = "test") -> dict[int | str, SiteTest]:
    """Return the tests of a run by the numbers of clients and the names of other sites.

    Args:
        run: the run's folder.
        part: "test", or ``BATCH`` for the tests with batch statistics.

    Raises:
        ConfigError: the run has no single predictions.
    """
    summary = read_json(run / "summary.json")
    tests = read_predictions(run, summary.get("sha256", ""))
    if not tests:
        raise ConfigError(
            f"{run} has no predictions. A run writes them at its end, if the server has"
            " the data, dp and masked-sums are off, it has at most 50 sites, and its"
            " test has no statistics of the test inputs."
        )
    found = {one.identity: one for one in tests if one.part == part}
    return found


class Comparison(NamedTuple):
    """The sites of a run, maybe compared with another run.

    Attributes:
        rows: a row for each site, see ``sites_of_run``.
        mean: the mean of the sites that trained.
        other: the same mean of the other run.
        gap: the mean difference.
        sites: the names of the sites in these means.
        left_out: the other sites that trained, with the reasons.
        examples: the test examples of these sites.
    """

    rows: list[dict[str, Any]]
    mean: Interval
    other: Interval
    gap: Interval
    sites: Sequence[str]
    left_out: Mapping[str, str]
    examples: int


def sites_of_run(run: Path, against: Path | None = None) -> Comparison:
    """Return a row for each site of a run, and the means.

    A row has the keys of ``SiteTest.row``, ``groups`` (the number of units), the ends
    ``low`` and ``high``, and ``why``. With another run there are also ``difference``,
    ``difference-low``, ``difference-high`` and ``difference-why``.

    Raises:
        ConfigError: a run has no predictions, or they are of other examples.
    """
    tested = tests_of(run)
    others = tests_of(against) if against else {}
    rows: list[dict[str, Any]] = []
    found: list[tuple[dict[str, Any], tuple[Interval, Interval, Interval]]] = []
    for name, site in tested.items():
        own, other, gap = interval(site), Interval(), Interval()
        row = {**site.row, "groups": len(site.groups)} | _shown("", own)
        if against:
            pair = others.get(name)
            if pair is None or (pair.groups and site.groups and not site.fits(pair)):
                raise ConfigError(
                    f"{against} does not test the examples of {run}: its data, number of"
                    " clients or split (partition, seed, test-share) differ. Compare"
                    " runs on one split."
                )
            pair = pair.scored_by(site.task.score)
            gap = Interval(why="no model of the site")
            if site.groups and pair.groups:
                other, gap = interval(pair), difference(site, pair)
            row |= _shown("difference", gap)
        rows.append({key: one for key, one in row.items() if one != ""})
        if site.client is not None:
            found.append((row, (own, other, gap)))
    # A mean and the difference beside it are over the same sites.
    key = 2 if against else 0
    kept = [one for one in found if one[1][key].error is not None]
    left = [one for one in found if one not in kept] if kept else []
    reasons = {site_label(row): numbers[key].why for row, numbers in left}
    used = kept or [one for one in found if one[1][key].value is not None]
    own, other, gap = (mean(numbers[at] for _, numbers in used) for at in range(3))
    names = [str(row["site"]) for row, _ in used]
    examples = sum(int(row["examples"]) for row, _ in used)
    return Comparison(rows, own, other, gap, names, reasons, examples)


def _shown(key: str, found: Interval) -> dict[str, Any]:
    low, high = found.ends()
    dash = f"{key}-" if key else ""
    number = {f"{dash}low": low, f"{dash}high": high, f"{dash}why": found.why}
    return {key or "value": found.value, **number}


def mismatch(run: Path) -> str:
    """Return a sentence if batch statistics are right and running ones are wrong.

    It is "" if they are not, or if the run has no test with batch statistics.
    """
    try:
        running, batch = tests_of(run), tests_of(run, BATCH)
    except ConfigError:
        return ""
    pairs = [(batch[name], running[name]) for name in batch if running[name].groups]
    gap = mean(difference(*pair) for pair in pairs)
    if gap.value is None or not gap.side():
        return ""
    metric = pairs[0][0].task.score
    by_batch, plain = (
        mean(map(interval, tests)).value for tests in zip(*pairs, strict=True)
    )
    gain = gap.value if higher_is_better(metric) else -gap.value
    enough = _GAP if in_percent(metric) else _GAP * abs(plain or 0)
    if gain < enough or by_batch is None or plain is None:
        return ""
    form = "{:.1%}" if in_percent(metric) else "{:.4f}"
    return (
        f"The running statistics do not fit the weights: with batch statistics the mean"
        f" {metric} is {form.format(by_batch)}, with running statistics, which count,"
        f" {form.format(plain)}"
    )


def _draws(site: SiteTest) -> NDArray[np.float64]:
    """Return the metric over draws of the units, equal for tests of as many units."""
    # Import here, because only these draws need scikit-learn.
    import sklearn

    # The checks of many draws of the same examples would take longer than the metrics.
    unchecked = {"assume_finite": True, "skip_parameter_validation": True}
    count, draw = len(site.groups), np.random.default_rng(_SEED)
    if _units(site) < 2:
        return np.empty(0)
    with np.errstate(all="ignore"), sklearn.config_context(**unchecked):
        chosen = (draw.integers(count, size=count) for _ in range(_RESAMPLES))
        return np.array([site.metric(units) for units in chosen])


def _units(site: SiteTest) -> int:
    """Return the number of units, or of those with the rarer of two classes.

    The rarer class decides how certain a metric of classes, such as AUROC, is.
    """
    classes = torch.unique(site.targets[~site.targets.isnan()])
    by_class = site.task.score not in ("accuracy", "loss")
    if not by_class or site.task.by_pixel or len(classes) != 2:
        return len(site.groups)
    has = [[bool((site.targets[g] == c).any()) for g in site.groups] for c in classes]
    return min(map(sum, has))


def _of_draws(
    site: SiteTest, value: float, draws: NDArray[np.float64], lowest: int
) -> Interval:
    """Return a number of a site. A share has the limits ``lowest`` and 1."""
    if not len(site.groups):
        return Interval(why="no test examples")
    if not np.isfinite(value):
        return Interval(why="the targets of the test examples are all equal")
    share, units = in_percent(site.task.score), _units(site)
    limits = (float(lowest), 1.0) if share else (-math.inf, math.inf)
    plain = Interval(value, limits=limits)
    if len(site.groups) < 2:
        return plain._replace(why="only one test example or patient")
    if units < min(FEWEST, len(site.groups)):
        noun = "test example or patient" if units == 1 else "test examples or patients"
        why = f"the rarer class has {units} {noun}; {FEWEST} are needed"
        return plain._replace(why=why)
    defined = draws[np.isfinite(draws)]
    if len(defined) < len(draws) / 2:
        return plain._replace(why="more than half of the draws lack a class")
    error, freedom = defined.std() * (units / (units - 1)) ** 0.5, len(site.groups) - 1
    if np.ptp(defined) <= _ROUNDING:
        if not share:
            return plain._replace(why="all draws of the test examples are equal")
        from scipy import stats

        t = stats.t.ppf((1 + LEVEL) / 2, freedom)
        error = (1 - 0.05 ** (1 / units)) / t
    return plain._replace(error=float(error), freedom=freedom)

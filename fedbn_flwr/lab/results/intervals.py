"""The means, differences and intervals of runs and of their sites.

They are computed from the single predictions that a run writes once, at its end (see
``predictions``). No model and no data are read again. There is one rule:

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
- Sites that never train are in no mean. A run that diverged is in no mean of a study.
- A study compares its methods on the seeds with a result of every compared method,
  and on the sites that count in each of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.results.files import read_json
from fedbn_flwr.lab.results.folder import DIVERGED_AT
from fedbn_flwr.lab.results.predictions import BATCH, SiteTest, read_predictions
from fedbn_flwr.lab.results.tests_table import HELD_OUT, headline_in, read_tests
from fedbn_flwr.server.methods.params import TEST_BN
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of

LEVEL = 0.95
_RESAMPLES, _SEED = 400, 0
_ROUNDING = 1e-9
_GAP = 0.1
"""By how much batch statistics must be better than running ones to be named: a share of
the examples, or of the error.
"""


CLASSES = "classes"
"""The key of a site's figures if there are two classes, see ``at_threshold``."""


_FEWEST_TESTS, _FALL, _LEAST_FALL = 6, 6, 0.01
"""A curve falls before its end if it has so many tests, and if its last value is below
the best by so many median changes and by this share of the best.
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
    why, limits = _why_none(site), _limits(site.task.score, 0)
    if why:
        known = site.value if math.isfinite(site.value) else None
        return Interval(known, why=why, limits=limits)
    return _of_draws(site, Interval(site.value, limits=limits), _draws(site))


def difference(one: SiteTest, other: SiteTest) -> Interval:
    """Return the metric of ``one`` minus the metric of ``other`` on the same examples."""
    why, limits = _why_none(one) or _why_none(other), _limits(one.task.score, -1)
    gap = one.value - other.value
    if why:
        return Interval(gap if math.isfinite(gap) else None, why=why, limits=limits)
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
        if one.why:
            return Interval(fmean(values), why=one.why, limits=limits)
    if len(values) < 2:
        # As in ``evaluate``, one seed covers only other test examples.
        why = "" if known[0].error is not None else "one seed has no interval"
        return known[0]._replace(why=why)
    errors, freedom = [stdev(values) / len(values) ** 0.5], [len(values) - 1.0]
    within = _within(known)
    if max(values) - min(values) <= _ROUNDING:
        if within.error is None:
            return Interval(fmean(values), why="equal with every seed", limits=limits)
        errors, freedom = [], []
    if within.error is not None:
        errors.append(within.error)
        freedom.append(within.freedom)
    return _welch(fmean(values), errors, freedom, limits)


def _within(known: Sequence[Interval]) -> Interval:
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
        return Interval(value, why="all draws are equal", limits=limits)
    shares = zip(variances, freedom, strict=True)
    inverse = math.fsum((one / total) ** 2 / count for one, count in shares)
    return Interval(value, total**0.5, 1 / inverse, "", limits)


def tests_of(run: Path) -> dict[int | str, SiteTest]:
    """Return the tests of a run by the numbers of clients and the names of other sites.

    Raises:
        ConfigError: the run has no single predictions.
    """
    tests = _by_site(read_predictions(run))
    # If no site could be tested, the rows have the errors.
    sites = read_json(run / "summary.json").get("sites", ())
    if not tests and not any("error" in row for row in sites):
        raise ConfigError(
            f"{run} has no predictions. A run writes them at its end, if the server has"
            " the data, dp is off, it has at most 50 sites, its test has no statistics of"
            " the test inputs, and its task is not a task of your own."
        )
    return tests


def _by_site(tests: Iterable[SiteTest], *, batch: bool = False) -> dict[Any, SiteTest]:
    """Return the tests that count, or those with batch statistics, by site."""
    return {
        test.site if test.client is None else test.client: test
        for test in tests
        if (test.bn == BATCH) == batch
    }


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
    """Return a row for each site of a finished run, and the means.

    A row has the keys of the row of the site in ``summary.json``, the number of its
    units ``groups``, the ends ``low`` and ``high``, and ``why``. With another run there
    are also ``difference``, ``difference-low``, ``difference-high`` and
    ``difference-why``.

    Raises:
        ConfigError: a run has no predictions, or they are of other examples.
    """
    tested = tests_of(run)
    others = tests_of(against) if against else {}
    rows: list[dict[str, Any]] = []
    found: list[tuple[dict[str, Any], tuple[Interval, Interval, Interval]]] = []
    for known in read_json(run / "summary.json")["sites"]:
        name = known.get("client", known["site"])
        site, pair = tested.get(name), others.get(name)
        nothing = Interval(
            why=known.get("error", known.get("note", "no test examples"))
        )
        own, other, gap = nothing, Interval(), Interval(why="no model of the site")
        row = {**known}
        if site:
            own, row["groups"] = interval(site), len(site.groups)
            row |= _two_classes(site, len(tested))
        if site and pair:
            if not site.fits(pair):
                raise _other_examples(run, against)
            pair = pair.scored_by(site.task.score)
            other, gap = interval(pair), difference(site, pair)
        row |= _shown("", own) | (_shown("difference", gap) if against else {})
        rows.append({key: one for key, one in row.items() if one != ""})
        if HELD_OUT not in row:
            found.append((row, (own, other, gap)))
    if against and not tested.keys() & others.keys():
        raise _other_examples(run, against)
    # A mean and the difference beside it are over the same sites.
    key = 2 if against else 0
    kept = [one for one in found if one[1][key].error is not None]
    used = kept or [one for one in found if one[1][key].value is not None]
    left = [one for one in found if one not in used]
    reasons = {str(row["site"]): numbers[key].why for row, numbers in left}
    own, other, gap = (mean(numbers[at] for _, numbers in used) for at in range(3))
    names = [str(row["site"]) for row, _ in used]
    examples = sum(int(row["examples"]) for row, _ in used)
    return Comparison(rows, own, other, gap, names, reasons, examples)


def share(hits: Tensor, test: SiteTest) -> Interval:
    """Return a share of examples, with Wilson's interval for the number of units."""
    from scipy import stats

    count = len(hits)
    if not count:
        return Interval(why="no such examples")
    # Examples of one patient are not independent, so count patients.
    units = max(1, round(count * len(test.groups) / len(test.units)))
    value = float(hits.double().mean())
    found = stats.binomtest(round(value * units), units)
    ends = found.proportion_ci(LEVEL, "wilson")
    return Interval(value, limits=(ends.low, ends.high))


def at_threshold(site: SiteTest, logit: float = 0.0) -> dict[str, Interval]:
    """Return the figures of a site with two classes, at a threshold of the logit."""
    kept = site.task.counting(site.targets).flatten()
    called = site.outputs[kept].flatten() > logit
    true = site.targets[kept].flatten() > 0
    most = true if 2 * int(true.sum()) > len(true) else ~true
    return {
        "accuracy": share(called == true, site),
        "base rate": share(most, site),
        "called positive": share(called, site),
        "sensitivity": share(called[true], site),
        "specificity": share(~called[~true], site),
    }


def _two_classes(site: SiteTest, of: int) -> dict[str, Any]:
    """Return the figures of a site's row if there are two classes.

    ``of`` sites are compared with chance.
    """
    if site.task.name != "binary":
        return {}
    found = {name: one.value for name, one in at_threshold(site).items()}
    _, high = interval(site.scored_by("auroc")).ends(of)
    if high is not None and high < 0.5:
        found["reversed"] = True
    return {CLASSES: found}


def _other_examples(run: Path, against: Path | None) -> ConfigError:
    return ConfigError(
        f"{against} does not test the examples of {run}: its data, number of clients or"
        " split (partition, seed, test-share) differ. Compare runs on one split."
    )


def _shown(key: str, found: Interval) -> dict[str, Any]:
    low, high = found.ends()
    dash = f"{key}-" if key else ""
    number = {f"{dash}low": low, f"{dash}high": high, f"{dash}why": found.why}
    return {key or "value": found.value, **number}


def last_tests(run: Path, model: str, upto: float = math.inf) -> list[dict[str, Any]]:
    """Return a row for each site with its last test up to a round, finished run or not.

    The tests are those of the sites' models, "own", or of the global model, "global". A
    row has ``site``, ``client``, ``examples`` and ``metrics``, the value of each metric
    by name. A site that never trains has a second value of each metric, with the
    statistics of its own inputs.
    """
    tests = read_tests(run)
    tests = tests[tests["round"] <= upto]
    of_sites = (tests["part"] == "test") & (tests["model"] == model)
    tests = tests[(tests["site"] != "") & (of_sites | (tests["part"] == HELD_OUT))]
    tests = tests[tests["bn"] != TEST_BN.strip("-")]
    adapted = tests["metric"].mask(
        tests["bn"] == "adapted", "adapted-" + tests["metric"]
    )
    tests = tests.assign(metric=adapted)
    rows = []
    for (site, client), of_site in tests.groupby(
        ["site", "client"], sort=False, dropna=False
    ):
        last = of_site[of_site["round"] == of_site["round"].max()]
        last = last.drop_duplicates("metric", keep="last")
        values = last["value"].astype(object).where(last["value"].notna(), None)
        row = {"site": site, "examples": int(last["examples"].iloc[0])}
        row |= {HELD_OUT: True} if pd.isna(client) else {"client": int(client)}
        metrics = dict(zip(last["metric"], values, strict=True))
        rows.append({**row, "metrics": metrics})
    return rows


def best_before_end(curve: Mapping[int, float], metric: str) -> int | None:
    """Return the best round if the curve falls afterwards by more than its noise.

    The noise of a round is the median change from one test to the next. The best of
    many rounds without a trend is six such changes above the last in 1 to 2 %.
    """
    sign = 1 if higher_is_better(metric) else -1
    values = sign * np.array([*curve.values()])
    if len(values) < _FEWEST_TESTS:
        return None
    fall = float(values.max() - values[-1])
    noise = float(np.median(np.abs(np.diff(values))))
    if fall > max(_FALL * noise, _LEAST_FALL * abs(float(values.max()))):
        return [*curve][int(values.argmax())]
    return None


class UnfitStatistics(NamedTuple):
    """A run that is right with batch statistics and wrong with running ones.

    Attributes:
        sites: the names of the sites at which it is so.
        metric: the metric.
        batch: its mean over these sites with batch statistics.
        running: the same mean with running statistics, which count.
        examples: the test examples of these sites.
    """

    sites: Sequence[str]
    metric: str
    batch: float
    running: float
    examples: int


def mismatch(tests: Sequence[SiteTest]) -> UnfitStatistics | None:
    """Return the fault of running statistics that do not fit the weights.

    It is None if they fit, or if there is no test with batch statistics.
    """
    running, by_batch, found = _by_site(tests), _by_site(tests, batch=True), []
    for name, batch in by_batch.items():
        plain, gap = running[name], batch.value - running[name].value
        metric = plain.task.score
        gain = gap if higher_is_better(metric) else -gap
        enough = _GAP if in_percent(metric) else _GAP * abs(plain.value)
        # Most models fit, so draw examples only if the gain is large.
        if gain >= enough and difference(batch, plain).side(len(by_batch)):
            found.append((batch, plain))
    if not found:
        return None
    names = [plain.site for _, plain in found]
    batch_mean = fmean(batch.value for batch, _ in found)
    plain_mean = fmean(plain.value for _, plain in found)
    examples = sum(len(plain.units) for _, plain in found)
    return UnfitStatistics(names, metric, batch_mean, plain_mean, examples)


class Ranking(NamedTuple):
    """The methods of a study on one split.

    Attributes:
        metric: the metric that ranks them.
        best: the best method.
        means: the mean of each method over its seeds, the best first.
        gaps: the best method minus the second, and minus training alone.
        pairs: the number of compared pairs of methods.
        sites: the best method minus training alone by site.
        seeds: the seeds with a result of each of these methods.
        examples: the test examples of a run, 0 without single predictions.
        short: the sites whose difference stays open with any number of seeds, because
            they have too few test examples.
        alone: the method that trains at each site alone, or None.
        at_sites: the methods with the mean over the sites, if others have the result
            of all test examples together.
    """

    metric: str
    best: str
    means: Mapping[str, Interval]
    gaps: Mapping[str, Interval]
    pairs: int
    sites: Mapping[str, Interval]
    seeds: Sequence[int]
    examples: int
    short: Sequence[str] = ()
    alone: str | None = None
    at_sites: Sequence[str] = ()


def ranking(results: Results, alone: str | None = None) -> Ranking | None:
    """Compare the results of methods on one split.

    Runs that diverged are left out of every mean, and ``remarks`` names them.

    Args:
        results: the results by method and seed.
        alone: the method that trains at each site alone.

    Returns:
        the comparison, or None if no seed has a result of every method.
    """
    known = {
        name: {seed: one for seed, one in own.items() if one.value is not None}
        for name, own in results.items()
    }
    metrics = [one.metric for own in known.values() for one in own.values()]
    # Methods with another metric cannot be compared.
    same = {
        name: own
        for name, own in known.items()
        if any(one.metric == metrics[0] for one in own.values())
    }
    # Means over different seeds could name another winner than the paired differences.
    common = [set(own) for own in same.values()]
    seeds = sorted(set.intersection(*common)) if common else []
    if not seeds:
        return None
    metric = metrics[0]
    limits = _limits(metric, 0)
    means = {}
    for name, own in same.items():
        values = [Interval(own[seed].value, limits=limits) for seed in seeds]
        means[name] = over_seeds(values)
    sign = 1 if higher_is_better(metric) else -1
    order = sorted(means, key=lambda name: -sign * float(means[name].value or 0))
    best, gaps, sites = order[0], dict[str, Interval](), dict[str, Interval]()
    short: list[str] = []
    for other in order[1:]:
        if other in (order[1], alone):
            pairs = [(same[best][seed], same[other][seed]) for seed in seeds]
            gaps[other], by_site = _gap(pairs)
            if other == alone:
                sites = {site: over_seeds(own) for site, own in by_site.items()}
                of = len(sites)
                short = [s for s, own in by_site.items() if not _within(own).side(of)]
    examples = max(same[best][seed].examples for seed in seeds)
    ranked = {name: means[name] for name in order}
    count = math.comb(len(order), 2)
    found = Ranking(metric, best, ranked, gaps, count, sites, seeds, examples, short)
    at_sites = [name for name in order if same[name][seeds[0]].own]
    at_sites = at_sites if len(at_sites) < len(order) else []
    return found._replace(alone=alone if alone in ranked else None, at_sites=at_sites)


class Result(NamedTuple):
    """The result of a finished run.

    Attributes:
        run: the run's folder.
        metric: the main metric.
        value: its value, for sites' own models the mean over the sites that count;
            None if the run diverged or has no value.
        diverged: whether the run diverged.
        own: whether the result is the mean over the sites.
        all_tests: the tests of its sites, also those with batch statistics.
        left_out: the tested clients that do not count, with the reasons.
    """

    run: Path
    metric: str
    value: float | None
    diverged: bool
    own: bool
    all_tests: Sequence[SiteTest]
    left_out: Mapping[int, str] = {}

    @property
    def tests(self) -> dict[int, SiteTest]:
        """The tests of the sites that trained, by client."""
        found = _by_site(self.all_tests)
        return {name: one for name, one in found.items() if one.client is not None}

    @property
    def counted(self) -> dict[int, SiteTest]:
        """The tests of the sites that count, by client."""
        return {k: one for k, one in self.tests.items() if k not in self.left_out}

    @property
    def examples(self) -> int:
        """The test examples of the sites in the value."""
        used = self.counted if self.own else self.tests
        return sum(len(one.units) for one in used.values())

    def fits(self, other: Result) -> bool:
        """Return whether the clients of both have the same test examples."""
        mine, theirs = self.tests, other.tests
        return all(mine[one].fits(theirs[one]) for one in mine.keys() & theirs.keys())

    def without(self, left_out: Mapping[int, str]) -> Result:
        """Return the result without these clients, each with the reason."""
        found = self._replace(left_out={**self.left_out, **left_out})
        if not self.own or self.value is None or not self.tests:
            return found
        values = [one.value for one in found.counted.values()]
        return found._replace(value=fmean(values) if values else None)


def result_of(run: Path) -> Result:
    """Return the result of a finished run.

    The sites with enough examples count, or all with a value if none has enough.
    """
    summary = read_json(run / "summary.json")
    key, diverged = headline_in(summary), DIVERGED_AT in summary
    value = None if diverged else summary["final"].get(key)
    own, tests = key.startswith("personal-own"), read_predictions(run)
    result = Result(run, quantity_of(key), value, diverged, own, tests)
    reasons = {client: _why_none(one) for client, one in result.tests.items()}
    if all(reasons.values()):
        known = {k for k, one in result.tests.items() if math.isfinite(one.value)}
        reasons = {
            client: why for client, why in reasons.items() if client not in known
        }
    return result.without({client: why for client, why in reasons.items() if why})


Results = Mapping[str, Mapping[int, Result]]
"""The results of finished runs by method and seed."""


def of_common_sites(results: Results) -> Results:
    """Return the results over the sites that count with every method of a seed.

    Means over other sites would compare the sites and not the methods. Methods with
    other clients, such as one client with all data, have no common sites.
    """
    groups = dict[tuple[int, str], dict[str, Result]]()
    for name, own in results.items():
        for seed, one in own.items():
            if one.own and one.tests and one.value is not None:
                groups.setdefault((seed, one.metric), {})[name] = one
    found = {name: {**own} for name, own in results.items()}
    for (seed, _), runs in groups.items():
        for name, one in runs.items():
            left = {
                client: f"{other} has no result there"
                for other, its in runs.items()
                if one.fits(its)
                for client in one.counted.keys() - its.counted.keys()
            }
            found[name][seed] = one.without(left)
    return found


def remarks(results: Mapping[int, Result]) -> str:
    """Return the reasons why the results of a method are not to be trusted, or ""."""
    diverged = [str(seed) for seed, one in results.items() if one.diverged]
    kept = {seed: one for seed, one in results.items() if not one.diverged}
    unfit = [str(seed) for seed, one in kept.items() if mismatch(one.all_tests)]
    few = dict[str, str]()
    for one in kept.values():
        for client, test in one.tests.items():
            left = one.left_out.get(client)
            why = f"left out of the mean, {left}" if left else _why_none(test)
            if why:
                few.setdefault(test.site, why)
    found = [f"{site}: {why}" for site, why in few.items()]
    if unfit:
        found.insert(0, f"running statistics do not fit (seed {', '.join(unfit)})")
    if diverged:
        found.insert(0, f"diverged and left out (seed {', '.join(diverged)})")
    return "; ".join(found)


def _gap(
    pairs: Iterable[tuple[Result, Result]],
) -> tuple[Interval, dict[str, list[Interval]]]:
    """Return the mean difference of two methods over seeds, and all of each site."""
    means, by_site = [], dict[str, list[Interval]]()
    for one, other in pairs:
        counted = []
        for name in sorted(one.tests.keys() & other.tests.keys()):
            mine, theirs = one.tests[name], other.tests[name]
            if mine.fits(theirs):
                of_site = difference(mine, theirs)
                by_site.setdefault(mine.site, []).append(of_site)
                counted += [of_site] if name in one.counted else []
        gap = float(one.value or 0) - float(other.value or 0)
        plain = Interval(gap, limits=_limits(one.metric, -1))
        within = mean(counted)
        if one.own and other.own and within.error is not None:
            plain = plain._replace(error=within.error, freedom=within.freedom)
        means.append(plain)
    return over_seeds(means), by_site


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


def _limits(metric: str, lowest: int) -> tuple[float, float]:
    """Return the lowest and the highest value; a share is at least ``lowest``."""
    if in_percent(metric):
        return float(lowest), 1.0
    return -math.inf, math.inf


def _why_none(site: SiteTest) -> str:
    """Return the reason why the examples of a site give no interval, or ""."""
    if not site.groups:
        return "no test examples"
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

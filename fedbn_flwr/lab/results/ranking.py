"""The methods of a study: which runs, seeds and sites count, and which method is best.

A study compares its methods on the seeds with a result of every compared method, and on
the sites that count in each of them. A run that diverged is in no mean. The numbers and
their intervals are in ``intervals``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from fedbn_flwr.lab.results.files import read_json
from fedbn_flwr.lab.results.folder import DIVERGED_AT
from fedbn_flwr.lab.results.intervals import (
    ONE_VALUE,
    Interval,
    difference,
    mean,
    over_seeds,
    range_of,
    seeds_to_decide,
    why_none,
    within_seeds,
)
from fedbn_flwr.lab.results.predictions import SiteTest, read_predictions
from fedbn_flwr.lab.results.sites import by_site, mismatch
from fedbn_flwr.lab.results.tests_table import metric_in
from fedbn_flwr.training.tasks import higher_is_better


class Ranking(NamedTuple):
    """The methods of a study on one split.

    Attributes:
        metric: the metric that ranks them.
        best: the best method; "" if the methods have different tests.
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
            of all test examples together. There is then no difference.
        needed: the seeds that would decide each open difference; 0 if seeds alone do
            not, see ``seeds_to_decide``.
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
    needed: Mapping[str, int] = {}


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
    limits = range_of(metric, 0)
    means = {}
    for name, own in same.items():
        values = [Interval(own[seed].value, limits=limits) for seed in seeds]
        means[name] = over_seeds(values)
    sign = 1 if higher_is_better(metric) else -1
    order = sorted(means, key=lambda name: -sign * float(means[name].value or 0))
    ranked = {name: means[name] for name in order}
    alone = alone if alone in ranked else None
    at_sites = [name for name in order if same[name][seeds[0]].own]
    if 0 < len(at_sites) < len(order):
        nothing: dict[str, Interval] = {}
        found = Ranking(metric, "", ranked, nothing, 0, nothing, seeds, 0)
        return found._replace(alone=alone, at_sites=at_sites)
    best, gaps, sites = order[0], dict[str, Interval](), dict[str, Interval]()
    count, needed = math.comb(len(order), 2), dict[str, int]()
    short: list[str] = []
    for other in order[1:]:
        if other in (order[1], alone):
            pairs = [(same[best][seed], same[other][seed]) for seed in seeds]
            of_seeds, by_site = _gap(pairs)
            gaps[other] = over_seeds(of_seeds)
            if not gaps[other].side(count):
                needed[other] = seeds_to_decide(of_seeds, count)
            if other == alone:
                sites = {site: over_seeds(own) for site, own in by_site.items()}
                of = len(sites)
                short = [
                    s
                    for s, own in by_site.items()
                    if own[0].why != ONE_VALUE and not within_seeds(own).side(of)
                ]
    examples = max(same[best][seed].examples for seed in seeds)
    found = Ranking(metric, best, ranked, gaps, count, sites, seeds, examples, short)
    return found._replace(alone=alone, needed=needed)


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
        found = by_site(self.all_tests)
        return {name: one for name, one in found.items() if one.client is not None}

    @property
    def counted(self) -> dict[int, SiteTest]:
        """The tests of the sites that count, by client."""
        return {k: one for k, one in self.tests.items() if k not in self.left_out}

    @property
    def examples(self) -> int:
        """The test examples of the sites in the value."""
        used = self.counted if self.own else self.tests
        return sum(one.examples for one in used.values())

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
    key, diverged = summary["headline"], DIVERGED_AT in summary
    value = None if diverged else summary["final"].get(key)
    own, tests = key.startswith("personal-own"), read_predictions(run)
    result = Result(run, metric_in(summary), value, diverged, own, tests)
    reasons = {client: why_none(one) for client, one in result.tests.items()}
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
            why = f"left out of the mean, {left}" if left else why_none(test)
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
) -> tuple[list[Interval], dict[str, list[Interval]]]:
    """Return the difference of two methods with each seed, and those of each site."""
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
        plain = Interval(gap, limits=range_of(one.metric, -1))
        within = mean(counted)
        if one.own and other.own and within.error is not None:
            plain = plain._replace(error=within.error, freedom=within.freedom)
        means.append(plain)
    return means, by_site

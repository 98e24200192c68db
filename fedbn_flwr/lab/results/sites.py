"""The sites of a run: which count in its mean, and their last tests.

Sites that never train are in no mean. Two runs are compared on the same examples. The
numbers and their intervals are in ``intervals``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.results.files import read_json
from fedbn_flwr.lab.results.intervals import (
    Interval,
    at_threshold,
    difference,
    interval,
    mean,
)
from fedbn_flwr.lab.results.predictions import BATCH, SiteTest, read_predictions
from fedbn_flwr.lab.results.tests_table import HELD_OUT, read_tests
from fedbn_flwr.server.methods.params import TEST_BN
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.tasks import higher_is_better, in_percent

CLASSES = "classes"
"""The key of a site's figures if there are two classes, see ``at_threshold``."""
_GAP = 0.1
"""By how much batch statistics must be better than running ones to be named: a share of
the examples, or of the error.
"""
_FEWEST_TESTS, _FALL, _LEAST_FALL = 6, 6, 0.01
"""A curve falls before its end if it has so many tests, and if its last value is below
the best by so many median changes and by this share of the best.
"""


def tests_of(run: Path) -> dict[int | str, SiteTest]:
    """Return the tests of a run by the numbers of clients and the names of other sites.

    Raises:
        ConfigError: the run has no single predictions.
    """
    tests = by_site(read_predictions(run))
    # If no site could be tested, the rows have the errors.
    sites = read_json(run / "summary.json").get("sites", ())
    if not tests and not any("error" in row for row in sites):
        raise ConfigError(
            f"{run} has no predictions. A run writes them at its end, if the server has"
            " the data, dp is off, it has at most 50 sites, and its test has no"
            " statistics of the test inputs."
        )
    return tests


def by_site(tests: Iterable[SiteTest], *, batch: bool = False) -> dict[Any, SiteTest]:
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
            own = interval(site)
            if not isinstance(site.task, OwnTask):
                row["groups"] = len(site.groups)
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
    running, by_batch, found = by_site(tests), by_site(tests, batch=True), []
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

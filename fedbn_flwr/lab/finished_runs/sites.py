"""The table by site of a finished run, or of two finished runs.

A row has the main metric with an interval, and the paired difference to the other run.

The interval is the value ± t times its standard error. The standard error is the
standard deviation of bootstrap draws of the groups of a site (patients): all examples
of a group are drawn together. It covers other groups of the same site, but not other
seeds of the training. These rules make it hold at small sites:

- t is the quantile of Student's distribution for the number of groups. The standard
  error is corrected for n - 1. If the metric needs two classes, n counts only the
  groups with the rarer class.
- If the metric of a draw is undefined, because the draw lacks a class, it is left out.
  If more than half of the draws are left out, the site has no interval.
- If all draws are equal, for example because all predictions are right, a share of n
  groups is uncertain by 1 - 0.05^(1/n), about 3 / n: with a smaller share, n groups
  would all be right in less than 5 % of the tests.
- A site with fewer than two groups has no interval, and neither has a site with fewer
  than five groups with the rarer class, if the metric needs two classes: two events
  would make the mean of all sites uncertain. Its row contains the reason.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.lab.config import data_of, method_of
from fedbn_flwr.lab.files import read_json, site_names_of
from fedbn_flwr.lab.finished_runs.saved_model import Choice, run_config, saved_model
from fedbn_flwr.lab.output.site_tests import (
    Numbers,
    SiteTest,
    read_predictions,
    test_sites,
)
from fedbn_flwr.lab.partitioned.check_data import has_other_data
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.setup import on_device
from fedbn_flwr.server.methods.params import TEST_BN
from fedbn_flwr.training.tasks import in_percent

LEVEL = 0.95
FEWEST = 5
"""The fewest groups with the rarer class for an interval of a metric of classes."""
_ROUNDING = 1e-12


class Interval(NamedTuple):
    """A metric or a difference with its interval. An undefined number is None.

    Attributes:
        value: the number.
        low: the lower end of the interval.
        high: the upper end of the interval.
        spread: the standard error.
        why: the reason why there is no interval.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    spread: float | None = None
    why: str = ""


def interval(site: SiteTest) -> Interval:
    """Return the main metric of a site, with its interval."""
    return _of_draws(site, site.value, site.draws, 0)


def difference(one: SiteTest, other: SiteTest) -> Interval:
    """Return the metric of ``one`` minus the metric of ``other``, with its interval.

    Both tests have the same examples.
    """
    # Each draw is used for both models, so that the difference does not depend on how
    # hard the drawn examples are.
    value = one.value - other.value
    return _of_draws(one, value, one.draws - other.draws, -1)


def _of_draws(site: SiteTest, value: float, draws: Numbers, lowest: int) -> Interval:
    """Return a number of a site. A share has the limits ``lowest`` and 1."""
    if not len(site.groups):
        return Interval(why="no test examples")
    if not np.isfinite(value):
        return Interval(why="the targets of the test examples are all equal")
    units, share = site.units, in_percent(site.task.score)
    if len(site.groups) < 2:
        return Interval(value, why="only one test example or patient")
    if units < min(FEWEST, len(site.groups)):
        noun = "test example or patient" if units == 1 else "test examples or patients"
        why = f"the rarer class has {units} {noun}; {FEWEST} are needed"
        return Interval(value, why=why)
    num_draws, draws = len(draws) - 1, draws[1:][np.isfinite(draws[1:])]
    if len(draws) < num_draws / 2:
        return Interval(value, why="more than half of the draws lack a class")
    # Import here, because SciPy takes long to import, and only this table needs it.
    from scipy import stats

    t = stats.t.ppf((1 + LEVEL) / 2, len(site.groups) - 1)
    # The deviation in n examples is smaller than the deviation in their population.
    spread = draws.std() * (units / (units - 1)) ** 0.5
    if np.ptp(draws) <= _ROUNDING:
        if not share:
            return Interval(value, why="all draws of the test examples are equal")
        spread = (1 - 0.05 ** (1 / units)) / t
    low, high = value - t * spread, value + t * spread
    if share:
        low, high = max(low, lowest), min(high, 1)
    return Interval(value, float(low), float(high), float(spread))


def sites_of_run(
    run: Path, against: Path | None = None, *, again: bool = False
) -> list[dict[str, Any]]:
    """Return a row for each site of a run, with its own test examples.

    Args:
        run: the run's folder.
        against: the folder of a run with the same test examples, for the difference;
            None without a comparison.
        again: whether the saved models are tested again on the data. By default, this is
            done only if the folder has no predictions.

    Raises:
        ConfigError: the runs do not test the same examples, their data have changed, or
            the main test has statistics of its inputs.
        DataError: the data are not here.
        StateError: a run lacks its model, or a client's own model.
    """
    tested = _tests(run, again)
    # Compare both runs by the main metric of the first run.
    others = {
        _identity(site): site.scored_by(tested[0].task.score)
        for site in (_tests(against, again) if against and tested else ())
    }
    rows = []
    for site in tested:
        row = {**site.row, "groups": len(site.groups)}
        row |= {**interval(site)._asdict(), **site.decisions}
        if against:
            other = others.get(_identity(site))
            # A site without a model in one of the runs has no difference.
            pair = [
                one for one in (site, other) if one and (one.groups or not one.note)
            ]
            if other is None or (len(pair) == 2 and not site.has_examples_of(other)):
                raise ConfigError(
                    f"{against} does not test the examples of {run}: its data, number"
                    " of clients or split (partition, seed, test-share) differ."
                    " Compare runs on one split."
                )
            found = Interval(why="no model of the site")
            if len(pair) == 2:
                found = difference(site, other)
            row |= {f"difference-{key}": one for key, one in found._asdict().items()}
            row["difference"] = row.pop("difference-value")
        # A reason that is absent has no key.
        rows.append({key: one for key, one in row.items() if one != ""})
    return rows


def _identity(site: SiteTest) -> int | str:
    return site.name if site.client is None else site.client


def _tests(run: Path, again: bool) -> list[SiteTest]:
    """Return the test of a run's model at each site."""
    summary = read_json(run / "summary.json")
    found = [] if again else read_predictions(run, summary.get("sha256", ""))
    if found:
        return found
    # Refuse other data than the run's, and a test whose result depends on the other
    # test inputs.
    config = run_config(run)
    if has_other_data(run, config):
        raise ConfigError(
            f"dataset={config.dataset!r} has changed since the run in {run}. Its test"
            " examples may be training examples of the run. Restore the data, or"
            " evaluate new data with --dataset."
        )
    method = method_of(config)
    test = method.tests[0]
    if test.endswith(TEST_BN):
        raise ConfigError(
            f"{run}: its main test, {test}, has BatchNorm statistics of the test"
            " inputs."
        )

    # Keep only the last model, because each model may fill a GPU. If all sites have the
    # same model, it is loaded once.
    @functools.lru_cache(1)
    def load(choice: Choice) -> nn.Module:
        return on_device(saved_model(run, choice).model, config)

    # The run's summary says why a site lacks its own model.
    notes = [row.get("note", "") for row in summary.get("sites", ())]

    def model_of(client: int | None) -> tuple[nn.Module | None, str]:
        if client is None or not method.tests_own_models:
            return load(Choice()), ""
        note = notes[client] if client < len(notes) else ""
        try:
            return load(Choice(client=client)), note
        except StateError:
            if not note:
                raise
            return None, note

    data = partitioned_data(config, count_clients(config))
    return test_sites(data, site_names_of(run), data_of(config).test_task, model_of)

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
  groups is uncertain by 3 / n ("rule of three").
- A site with fewer than two groups has no interval. Its row contains the reason.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError, DataError, StateError
from fedbn_flwr.lab.config import data_of, method_of
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.files import read_json, site_names_of
from fedbn_flwr.lab.finished_runs.saved_model import Choice, load_model, run_config
from fedbn_flwr.lab.output.site_tests import site_names
from fedbn_flwr.lab.partitioned.counts import has_other_data
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.setup import on_device
from fedbn_flwr.server.methods.params import TEST_BN
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.metrics import confusion, dice, mean_iou
from fedbn_flwr.training.tasks import Task, in_percent

LEVEL = 0.95
_RESAMPLES = 400  # enough for a standard error
_ROUNDING = 1e-12
_SEED = 0
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class SiteTest:
    """The outputs of a model for the N test examples of one site.

    Attributes:
        task: the learning task; its score is the metric.
        outputs: (N, ...); for a segmentation, the confusion matrices of the examples.
        targets: (N, ...).
        groups: the positions of the examples of each group.
        name: the name of the site, or "client N".
        error: the reason why the data cannot be read; then outputs are empty.
        note: the reason why the site lacks its own model; then outputs may be empty.
    """

    task: Task
    outputs: Tensor
    targets: Tensor
    groups: list[Indices]
    name: str = ""
    error: str = ""
    note: str = ""

    def metric(self, groups: Indices) -> float:
        """Return the main metric over all examples of the groups with these numbers.

        A number may be repeated.
        """
        score = self.task.score
        if score == "accuracy":
            correct, counted = self._correct[groups].sum(0)
            return float(correct / counted)
        # Take the examples of the groups. If each group has one example, use one array
        # instead of many: a thousand draws would otherwise take a minute.
        if len(self.groups) == len(self.targets):
            chosen = np.concatenate(self.groups)[groups]
        else:
            chosen = np.concatenate([self.groups[group] for group in groups])
        rows = torch.from_numpy(chosen)
        outputs, targets = self.outputs[rows], self.targets[rows]
        # Compute the metric over all chosen examples together, as ``evaluate`` does.
        if score == "loss":
            return float(self.task.loss(outputs, targets))
        if self.task.by_pixel:
            return _score_of_pixels(score, outputs.sum(0))
        return self.task.measure(outputs, targets)[score]

    @functools.cached_property
    def _correct(self) -> Indices:
        """The numbers of correct and of counted predictions by group, (groups, 2)."""
        rows = []
        for group in self.groups:
            outputs, targets = self.outputs[group], self.targets[group]
            correct = self.task.correct(outputs, targets)
            rows.append((int(correct), int(self.task.counted(targets))))
        return np.array(rows)

    @functools.cached_property
    def draws(self) -> Numbers:
        """The metric over all groups, then over draws of the groups.

        All tests of equally many groups have the same draws. A metric may be NaN,
        because a draw may lack a class.
        """
        # Import here, because only these draws need scikit-learn.
        import sklearn

        # The checks of many draws of the same examples would take longer than the
        # metrics.
        unchecked = {"assume_finite": True, "skip_parameter_validation": True}
        count, draw = len(self.groups), np.random.default_rng(_SEED)
        chosen = [np.arange(count)] if count else []
        if self.units > 1:
            chosen += [draw.integers(count, size=count) for _ in range(_RESAMPLES)]
        with np.errstate(all="ignore"), sklearn.config_context(**unchecked):
            return np.array([self.metric(groups) for groups in chosen])

    @functools.cached_property
    def units(self) -> int:
        """The number of groups, or of the groups with the rarer of two classes.

        The rarer class decides how certain a metric of classes, such as AUROC, is.
        """
        classes = torch.unique(self.targets[~self.targets.isnan()])
        by_class = self.task.score not in ("accuracy", "loss")
        if not by_class or self.task.by_pixel or len(classes) != 2:
            return len(self.groups)
        has = [
            [bool((self.targets[g] == c).any()) for g in self.groups] for c in classes
        ]
        return min(map(sum, has))

    @property
    def decisions(self) -> dict[str, float]:
        """For a yes or no: the shares of yes among the targets and the predictions.

        The two shares and ``excess``, their difference, have standard errors.
        """
        found: dict[str, float] = {}
        if getattr(self.task, "single", False) and self.groups:
            known = ~self.targets.flatten().isnan()
            yes = (self.targets.flatten()[known] > 0).double()
            called = (self.outputs.flatten()[known] > 0).double()
            numbers = {"yes": yes, "called": called, "excess": called - yes}
            for name, values in numbers.items():
                # Even if all are alike, a few examples do not make a share certain.
                variance = float(values.var(correction=0)) + 1 / len(self.groups)
                found[f"{name}-value"] = float(values.mean())
                found[f"{name}-spread"] = (variance / len(self.groups)) ** 0.5
        return found

    @property
    def words(self) -> dict[str, str]:
        """The error and the note, by their keys in the site's row."""
        return {"error": self.error, "note": self.note}

    def has_examples_of(self, other: SiteTest) -> bool:
        """Return whether the other test has the same targets in the same groups."""
        if self.targets.shape != other.targets.shape:
            return False
        # Two NaN are equal here, because NaN marks an unknown target.
        same = torch.isclose(self.targets, other.targets, 0, 0, equal_nan=True)
        if len(self.groups) != len(other.groups) or not same.all():
            return False
        return all(map(np.array_equal, self.groups, other.groups))


def _score_of_pixels(score: str, counts: Tensor) -> float:
    if score == "miou":
        return mean_iou(counts)
    if score == "dice":
        return dice(counts)
    return float(counts.trace() / counts.sum())


def test_site(model: nn.Module, data: Subset, task: Task) -> SiteTest:
    """Return the outputs of the model for the examples of a site."""
    if task.score != "loss":
        task = replace(task, metrics=(task.score,))
    outputs, targets = [], []

    def keep(of_batch: Tensor, targets_of_batch: Tensor) -> None:
        # For classes of pixels, keep only a confusion matrix of each image, because all
        # outputs would fill the memory.
        if task.by_pixel and task.score != "loss":
            counts = []
            for row in range(len(of_batch)):
                here = slice(row, row + 1)
                counts.append(
                    confusion(of_batch[here], targets_of_batch[here], task.ignore)
                )
            of_batch = torch.stack(counts)
            # The sums of the rows are the numbers of targets of each class.
            targets_of_batch = of_batch.sum(2)
        outputs.append(of_batch.cpu())
        targets.append(targets_of_batch.cpu())

    try:
        evaluate(model, data, task=task, on_batch=keep)
    except DataError as error:
        return SiteTest(task, torch.empty(0), torch.empty(0), [], error=str(error))
    if not outputs:
        return SiteTest(task, torch.empty(0), torch.empty(0), [])
    # Without groups such as patients, each example is a group of its own.
    units = np.arange(len(data)) if data.units is None else data.units.cpu().numpy()
    groups = [np.flatnonzero(units == unit) for unit in np.unique(units)]
    return SiteTest(task, torch.cat(outputs), torch.cat(targets), groups)


test_site.__test__ = False  # type: ignore[attr-defined]  # pytest must not collect it


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
    return _of_draws(site, site.draws, 0)


def difference(one: SiteTest, other: SiteTest) -> Interval:
    """Return the metric of ``one`` minus the metric of ``other``, with its interval.

    Both tests have the same examples.
    """
    # Each draw is used for both models, so that the difference does not depend on how
    # hard the drawn examples are.
    return _of_draws(one, one.draws - other.draws, -1)


def _of_draws(site: SiteTest, draws: Numbers, lowest: int) -> Interval:
    """Return a number of a site. A share has the limits ``lowest`` and 1."""
    if not len(site.groups):
        return Interval(why="no test examples")
    value, draws = float(draws[0]), draws[1:][np.isfinite(draws[1:])]
    if not np.isfinite(value):
        return Interval(why="the targets of the test examples are all equal")
    units, share = site.units, in_percent(site.task.score)
    if units < 2:
        return Interval(
            value, why="only one test example or patient, or one of a class"
        )
    if len(draws) < _RESAMPLES / 2:
        return Interval(value, why="more than half of the draws lack a class")
    # Import here, because SciPy takes long to import, and only this table needs it.
    from scipy import stats

    t = stats.t.ppf((1 + LEVEL) / 2, len(site.groups) - 1)
    # The deviation in n examples is smaller than the deviation in their population.
    spread = draws.std() * (units / (units - 1)) ** 0.5
    if np.ptp(draws) <= _ROUNDING:
        if not share:
            return Interval(value, why="all draws of the test examples are equal")
        spread = 3 / len(site.groups) / t
    low, high = value - t * spread, value + t * spread
    if share:
        low, high = max(low, lowest), min(high, 1)
    return Interval(value, float(low), float(high), float(spread))


def sites_of_run(run: Path, against: Path | None = None) -> list[dict[str, Any]]:
    """Return a row for each site of a run, with its own test examples.

    Args:
        run: the run's folder.
        against: the folder of a run with the same test examples, for the difference;
            None without a comparison.

    Raises:
        ConfigError: the runs do not test the same examples, their data have changed, or
            the main test has statistics of its inputs.
        DataError: the data are not here.
        StateError: a run lacks its model, or a client's own model.
    """
    # Compare both runs by the main metric of the first run.
    tested = _tests(run, "")
    others = {}
    if against:
        others = _tests(against, data_of(run_config(run)).task.score)
    rows = []
    for key, site in tested.items():
        row: dict[str, Any] = {"site": site.name, "examples": len(site.targets)}
        row["groups"] = len(site.groups)
        if isinstance(key, int):
            row["client"] = key
        row |= {**interval(site)._asdict(), **site.decisions, **site.words}
        if against:
            other = others.get(key)
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


def _tests(run: Path, metric: str) -> dict[int | str, SiteTest]:
    """Return the test of a run's model at each site.

    The key is the client's number, or the name of a held-out client.

    Args:
        run: the run's folder.
        metric: the main metric; with "", the run's own main metric.
    """
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
    task = data_of(config).test_task
    if metric:
        task = task.scored_by(metric)

    # Keep only the last model, because each model may fill a GPU. If all sites have the
    # same model, it is loaded once.
    @functools.lru_cache(1)
    def model_of(choice: Choice) -> nn.Module:
        return on_device(load_model(run, choice).model, config)

    data = partitioned_data(config, count_clients(config))
    tests: dict[int | str, SiteTest] = {}
    # Read from the run's summary why a site lacks its own model.
    known = read_json(run / "summary.json").get("sites", ())
    notes = [row.get("note", "") for row in known]
    for client, name in enumerate(site_names(data, site_names_of(run))):
        # the client's own model, or the model of all clients
        choice = Choice(client=client) if method.tests_own_models else Choice()
        note = notes[client] if client < len(notes) else ""
        try:
            site = test_site(model_of(choice), data.test_view(client), task)
        except StateError:
            if not note:
                raise
            site = SiteTest(task, torch.empty(0), torch.empty(0), [])
        tests[client] = replace(site, name=name, note=note)
    for at, name in enumerate(data.held_out_names):
        site = test_site(model_of(Choice()), data.held_out_views(at)[1], task)
        tests[name] = replace(site, name=name)
    return tests

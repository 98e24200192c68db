"""The table by site of a finished run, or of two finished runs.

A row has the main metric with an interval, and the paired difference to the other run.

The interval is the percentile bootstrap of ``scipy.stats`` over the groups of a site
(patients): all examples of a group are drawn together. It covers other groups of the
same site, but not other seeds of the training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
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
from fedbn_flwr.training.tasks import Task

LEVEL = 0.95
_RESAMPLES = 1000
_SEED = 0


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
            return float(correct) / float(counted)
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
    """A metric or a difference, and the ends of its interval.

    A number is None if it is undefined.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None


def interval(site: SiteTest) -> Interval:
    """Return the main metric of a site, with its interval.

    The interval is left out if all draws give the same metric.
    """
    found = _bootstrap(site.metric, len(site.groups))
    # If all examples are alike, such as all wrong, so are all draws, and their interval
    # would promise a certainty that a few examples do not give.
    return Interval(found.value) if found.low == found.high else found


def difference(one: SiteTest, other: SiteTest) -> Interval:
    """Return the metric of ``one`` minus the metric of ``other``, with its interval.

    Both tests have the same examples.
    """
    # Use each draw for both models, so that the difference does not depend on how hard
    # the drawn examples are.
    return _bootstrap(
        lambda groups: one.metric(groups) - other.metric(groups), len(one.groups)
    )


def _bootstrap(metric: Callable[[Indices], float], num_groups: int) -> Interval:
    if not num_groups:
        return Interval()
    everyone = np.arange(num_groups)
    value = metric(everyone)
    # A single group has no interval, because all draws are equal.
    if not np.isfinite(value) or num_groups == 1:
        return Interval(_or_none(value))
    # Import here, because SciPy takes long to import, and only this table needs it.
    import sklearn
    from scipy import stats

    # The first value was checked. The checks of a thousand draws of the same examples
    # would take longer than the metrics.
    unchecked = {"assume_finite": True, "skip_parameter_validation": True}
    with np.errstate(all="ignore"), sklearn.config_context(**unchecked):
        found = stats.bootstrap(
            (everyone,),
            metric,
            vectorized=False,
            rng=np.random.default_rng(_SEED),
            confidence_level=LEVEL,
            n_resamples=_RESAMPLES,
            method="percentile",
        )
        ends = found.confidence_interval
    # A draw may lack a class, so that a metric such as AUROC is undefined. The ends are
    # then NaN, and the interval is left out.
    return Interval(value, _or_none(ends.low), _or_none(ends.high))


def _or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


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
        row |= interval(site)._asdict()
        row |= {key: text for key, text in site.words.items() if text}
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
            found = difference(site, other) if len(pair) == 2 else Interval()
            row |= {
                "difference": found.value,
                "difference-low": found.low,
                "difference-high": found.high,
            }
        rows.append(row)
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

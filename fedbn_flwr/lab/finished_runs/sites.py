"""The table by site of a finished run: the main metric with an interval, and the paired
difference to another run.

The interval is the percentile bootstrap of ``scipy.stats`` over the groups of a site
(patients): all examples of a group are drawn together. It speaks of other groups of the
same site, not of other seeds of the training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import CENTRALIZED, data_of, method_of
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.finished_runs.saved_model import Choice, load_model, run_config
from fedbn_flwr.lab.output.site_tests import site_names
from fedbn_flwr.lab.partitioned.counts import has_other_data
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.setup import on_device
from fedbn_flwr.server.methods.params import TEST_BN
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.metrics import confusion, dice, mean_iou
from fedbn_flwr.training.tasks import Task

__all__ = ["LEVEL", "SiteTest", "difference", "interval", "sites_of_run", "test_site"]

LEVEL = 0.95
_RESAMPLES = 1000
_SEED = 0


@dataclass(frozen=True)
class SiteTest:
    """What a model gives for the test examples of one site.

    Attributes:
        task: the learning task; its score is the metric.
        outputs: (N, ...); of a segmentation the confusion matrix of each example in
            their place.
        targets: (N, ...).
        groups: the positions of the examples of each group.
    """

    task: Task
    outputs: Tensor
    targets: Tensor
    groups: list[Indices]

    def metric(self, groups: Indices) -> float:
        """Return the main metric of these groups together, of which each may be there
        several times.
        """
        # an example a group: a thousand draws of lists would take a minute
        if len(self.groups) == len(self.targets):
            rows = torch.from_numpy(np.concatenate(self.groups)[groups])
        else:
            rows = torch.from_numpy(
                np.concatenate([self.groups[group] for group in groups])
            )
        outputs, targets, score = (
            self.outputs[rows],
            self.targets[rows],
            self.task.score,
        )
        if score == "loss":
            return float(self.task.loss(outputs, targets))
        if self.task.by_pixel:
            counts = outputs.sum(0)
            of_counts = {"miou": mean_iou, "dice": dice}
            return (
                of_counts[score](counts)
                if score in of_counts
                else float(counts.trace() / counts.sum())
            )
        if score == "accuracy":
            return float(self.task.correct(outputs, targets)) / float(
                self.task.counted(targets)
            )
        return self.task.measure(outputs, targets)[score]

    def has_examples_of(self, other: SiteTest) -> bool:
        """Return whether the other test has the same targets in the same groups."""
        if self.targets.shape != other.targets.shape or len(self.groups) != len(
            other.groups
        ):
            return False
        same_targets = bool(
            torch.isclose(self.targets, other.targets, 0, 0, equal_nan=True).all()
        )
        return same_targets and all(map(np.array_equal, self.groups, other.groups))


def test_site(model: nn.Module, data: Subset, task: Task) -> SiteTest:
    """Return what the model gives for the examples of a site."""
    if task.score != "loss":
        task = replace(task, metrics=(task.score,))
    outputs, targets = [], []

    def keep(of_batch: Tensor, targets_of_batch: Tensor) -> None:
        if task.by_pixel and task.score != "loss":
            rows = range(len(of_batch))
            counts = [
                confusion(of_batch[i : i + 1], targets_of_batch[i : i + 1], task.ignore)
                for i in rows
            ]
            of_batch = torch.stack(counts)
            targets_of_batch = of_batch.sum(2)  # the targets of each class
        outputs.append(of_batch.cpu())
        targets.append(targets_of_batch.cpu())

    evaluate(model, data, task=task, on_batch=keep)
    if not outputs:
        return SiteTest(task, torch.empty(0), torch.empty(0), [])
    units = np.arange(len(data)) if data.units is None else data.units.cpu().numpy()
    groups = [np.flatnonzero(units == unit) for unit in np.unique(units)]
    return SiteTest(task, torch.cat(outputs), torch.cat(targets), groups)


test_site.__test__ = False  # type: ignore[attr-defined]  # no test of pytest's


def interval(site: SiteTest) -> tuple[float | None, float | None, float | None]:
    """Return the main metric of a site and the ends of its interval; None where one is
    not defined.
    """
    return _bootstrap(site.metric, len(site.groups))


def difference(
    one: SiteTest, other: SiteTest
) -> tuple[float | None, float | None, float | None]:
    """Return the metric of a model minus that of another one on the same examples, and
    the ends of its interval.
    """
    return _bootstrap(
        lambda groups: one.metric(groups) - other.metric(groups), len(one.groups)
    )


def _bootstrap(
    metric: Callable[[Indices], float], num_groups: int
) -> tuple[float | None, float | None, float | None]:
    if not num_groups:
        return None, None, None
    everyone = np.arange(num_groups)
    value = metric(everyone)
    if not np.isfinite(value) or num_groups == 1:
        return _or_none(value), None, None
    from scipy import stats

    settings = {
        "confidence_level": LEVEL,
        "n_resamples": _RESAMPLES,
        "method": "percentile",
    }
    with np.errstate(all="ignore"):
        found = stats.bootstrap(
            (everyone,),
            metric,
            vectorized=False,
            rng=np.random.default_rng(_SEED),
            **settings,
        )
        ends = found.confidence_interval
    # With AUROC, say, a draw may lack a class: then the ends are NaN, and there is no
    # interval.
    return value, _or_none(ends.low), _or_none(ends.high)


def _or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def sites_of_run(run: Path, against: Path | None = None) -> list[dict[str, Any]]:
    """Return a row for each site of a run, with its own test examples.

    Args:
        run: the run's folder.
        against: that of a run with the same test examples, for the difference; None =
            there is none.

    Raises:
        ConfigError: the runs do not test the same examples, their data have changed, or
            the main test has statistics of its inputs.
        DataError: the data are not here.
        StateError: a run lacks its model, or a client's own one.
    """
    tested = _tests(run, "")
    others = _tests(against, data_of(run_config(run)).task.score) if against else {}
    rows = []
    for name, site in tested.items():
        value, low, high = interval(site)
        row = {"site": name, "examples": len(site.targets), "groups": len(site.groups)}
        row |= {"value": value, "low": low, "high": high}
        if against:
            if name not in others or not site.has_examples_of(others[name]):
                raise ConfigError(
                    f"{against} does not test the examples of {run}: its data, number"
                    " of clients or split (partition, seed, test-share) are others."
                    " Compare runs on one split."
                )
            names = ("difference", "difference-low", "difference-high")
            row |= dict(zip(names, difference(site, others[name]), strict=True))
        rows.append(row)
    return rows


def _tests(run: Path, metric: str) -> dict[str, SiteTest]:
    """Return the tests of a run's models by site; ``metric`` is the main metric, "" =
    that of the run.
    """
    config = run_config(run)
    if has_other_data(run, config):
        raise ConfigError(
            f"dataset={config.dataset!r} has changed since the run in {run}: its test"
            " examples may be training examples of the run. Restore the data, or"
            " evaluate new data with --dataset."
        )
    if (test := method_of(config).tests[0]).endswith(TEST_BN):
        raise ConfigError(
            f"{run}: its main test, {test}, has BatchNorm statistics of the test"
            " inputs."
        )
    data = partitioned_data(config, count_clients(config))
    federated = config.strategy != CENTRALIZED
    personal = federated and (
        test.startswith("personal") or method_of(config).shares_nothing
    )
    own = personal and bool(method_of(config).methods.local)
    task = data_of(config).test_task
    task = task.scored_by(metric) if metric else task

    @functools.lru_cache(1)
    def model_of(choice: Choice) -> nn.Module:
        return on_device(load_model(run, choice).model, config)

    tests = {}
    for client, name in enumerate(site_names(data)):
        choice = Choice(client=client) if own else Choice()
        tests[name] = test_site(model_of(choice), data.test_view(client), task)
    for at, name in enumerate(data.held_out_names):
        tests[name] = test_site(model_of(Choice()), data.held_out_views(at)[1], task)
    return tests

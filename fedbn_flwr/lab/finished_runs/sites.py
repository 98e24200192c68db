"""The table by site of finished runs: on their own test examples or on new data, alone or against other runs.

All models are computed where the data are. The table has counts, figures and decisions, and no example.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import CENTRALIZED
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.finished_runs.examples import DataPart, choose_examples
from fedbn_flwr.lab.finished_runs.new_data import config_of_data, data_for_model
from fedbn_flwr.lab.finished_runs.saved_model import Choice, load_model, run_config
from fedbn_flwr.lab.output.folder import agreed_scale_of
from fedbn_flwr.lab.output.site_tests import site_names
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.partitioned.report import has_other_data
from fedbn_flwr.lab.setup import on_device
from fedbn_flwr.lab.sites.measured import Measured, measure
from fedbn_flwr.lab.sites.table import Site, site_table, unit_of
from fedbn_flwr.server.params import TEST_BN

__all__ = ["RunTests", "Tests", "compare", "outputs_of", "outputs_of_data", "sites_of_run", "table_of_tests"]

Tests = dict[str, Measured]
"""The outputs of a model by site."""


@dataclass(frozen=True)
class RunTests:
    """The outputs of a run's models for its own test examples.

    Attributes:
        run: its folder.
        sites: by name, each client with the model that the run has for it, those that were held out at the end.
        held_out: the names of these.
        unit: what a group of examples is called.
        examples: the data set, and the test examples of each site.
    """

    run: Path
    sites: Tests
    held_out: tuple[str, ...]
    unit: str
    examples: tuple[str, tuple[Indices, ...]]

    def has_examples_of(self, other: RunTests) -> bool:
        """Return whether two runs have the same clients with the same test examples."""
        (name, mine), (its, theirs) = self.examples, other.examples
        return name == its and len(mine) == len(theirs) and all(map(np.array_equal, mine, theirs))


def outputs_of(run: Path, metric: str = "") -> RunTests:
    """Return the outputs of a run's models for its own test examples.

    Args:
        run: the run's folder.
        metric: the main metric; "" = that of the run.

    Raises:
        ConfigError: the data have changed since the run, the task does not have the metric, or the main test has
            statistics of its inputs.
        DataError: the data are not here.
        StateError: the run lacks its model, or a client's own one.
    """
    config = run_config(run)
    if has_other_data(run, config):
        raise ConfigError(
            f"dataset={config.dataset!r} has changed since the run in {run}: its test examples may be training "
            "examples of the run. Restore the data, or evaluate new data with --dataset."
        )
    if (test := config.evaluations()[0]).endswith(TEST_BN):
        raise ConfigError(
            f"{run}: its main test, {test}, has BatchNorm statistics of the test inputs, and the table by site "
            "compares models with those that they have. Test the run on its data, by --dataset and --bn."
        )
    data = partitioned_data(config, count_clients(config))
    if scale := agreed_scale_of(run):
        data = replace(data, dataset=data.dataset.normalised(scale.mean, scale.std))
    federated = config.strategy != CENTRALIZED
    personal = federated and (test.startswith("personal") or config.shares_nothing())
    own = personal and (bool(config.methods().local) or config.standardise == "local")
    task = config.test_task()
    task = task.scored_by(metric) if metric else task
    names = (*site_names(data), *data.held_out_names)
    views = [data.test_view(client) for client in range(len(data.test))]
    views += [data.held_out_views(at)[1] for at in range(len(data.held_out))]
    sites: Tests = {}
    loaded: Choice | None = None
    for client, (name, view) in enumerate(zip(names, views, strict=True)):
        choice = Choice(client=client) if own and client < len(data.test) else Choice()
        if choice != loaded:
            loaded, model = choice, on_device(load_model(run, choice).model, config)
        sites[name] = measure(model, view, task)
    unit = unit_of(config.group_column, data.dataset.test.units is not None)
    tests = (*data.test, *(test for _, test in data.held_out))
    return RunTests(run, sites, data.held_out_names, unit, (data.dataset.name, tests))


def compare(runs: Sequence[RunTests], against: Sequence[RunTests] = (), name: str = "") -> dict[str, Any]:
    """Return the table by site of several runs of one method, with other seeds, against as many of another one.

    Args:
        runs: one or more.
        against: those of the other method, in the order of the seeds; () = there are none.
        name: what the other method is called.

    Raises:
        ConfigError: the runs do not test the same examples.
    """
    for other in (*runs, *against):
        if not other.has_examples_of(runs[0]):
            raise ConfigError(
                f"{other.run} does not test the examples of {runs[0].run}: its data, number of clients or split "
                "(partition, seed, test-share) are others. Compare runs on one split."
            )
    first = runs[0]
    return table_of_tests([one.sites for one in runs], [one.sites for one in against], first.held_out, first.unit, name)


def sites_of_run(run: Path, against: Path | None = None) -> dict[str, Any]:
    """Return the table by site of a run on its own test examples.

    Args:
        run: the run's folder.
        against: that of a run on the same data and the same split; None = there is none.

    Raises:
        ConfigError: the runs do not test the same examples, or the data have changed.
        DataError: the data are not here.
        StateError: a run lacks its model, or a client's own one.
    """
    tested = outputs_of(run)
    if against is None:
        return compare([tested])
    return compare([tested], [outputs_of(against, run_config(run).learning_task().score)], str(against))


def outputs_of_data(run: Path, data: Mapping[str, Any], choice: Choice, part: DataPart, metric: str) -> Tests:
    """Return the outputs of a run's model for new data, by group; "all" where they have none.

    Args:
        run: the run's folder.
        data: the config keys of the data, see ``evaluate_run``.
        choice: the model, if the run's clients have models of their own; else it is the global one.
        part: the examples.
        metric: the main metric.

    Raises:
        ConfigError: the data do not fit the model, or a setting is bad.
        DataError: the data are missing, or do not fit the task.
        StateError: the run lacks the model, or a part of it.
    """
    kept = run_config(run)
    own = kept.strategy != CENTRALIZED and bool(kept.methods().local)
    saved = load_model(run, choice if own else Choice())
    config = config_of_data(saved, data, "")
    new_data, _ = data_for_model(saved, config, {"class-names", "positive-values"} & data.keys())
    examples = choose_examples(saved, config, new_data, part)
    task, model = config.test_task().scored_by(metric), on_device(saved.model, config)
    return {name: measure(model, view, task) for name, view in examples.sites().items()}


def _same_examples(one: Measured, other: Measured) -> bool:
    mine, theirs = (measured.targets.double().numpy() for measured in (one, other))
    return np.array_equal(mine, theirs, equal_nan=True) and np.array_equal(one.groups, other.groups)


def table_of_tests(
    tested: Sequence[Tests], others: Sequence[Tests], held_out: Collection[str], unit: str, name: str
) -> dict[str, Any]:
    """Return the table of sites by name.

    Args:
        tested: the outputs by site, of each run.
        others: those of another method, of each run; () = there are none.
        held_out: the sites that took no part in the training.
        unit: what a group of examples is called.
        name: what the other method is called.

    Raises:
        ConfigError: another run's examples or targets are not those of the first one.
    """
    sites = []
    for site, first in tested[0].items():
        runs, against = [tests.get(site) for tests in tested], [tests.get(site) for tests in others]
        for one in (*runs, *against):
            if one is None or not _same_examples(first, one):
                raise ConfigError(
                    f"site {site}: the other run's test examples have other targets, patients or another order. "
                    "Compare runs on the same data, read with the same keys."
                )
        pair = [one for one in runs if one], [one for one in against if one]
        sites.append(Site(site, *pair, held_out=site in held_out))
    return site_table(sites, unit, name)

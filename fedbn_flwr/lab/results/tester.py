"""The tests that the server does: after each round, and of every site at the end.

``Tester`` has the examples, loads the models and tests them. Its results after a round
are rows of ``tests.csv``. At the end of the run, it also keeps the outputs for the
single examples, so that pages can compute intervals and differences without the data
and the models. ``training.evaluation.evaluate`` computes the numbers after a round.

The final models are tested up to three times, each for another result: the global model
on all test examples together, whose metric may not be a mean over sites; a held-out
client also with statistics of its own inputs; and each site with the outputs kept.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.adaptation import adapted, evaluate_adapted
from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.reestimation import load_statistics, reestimate_statistics
from fedbn_flwr.client.personal_model import ABSENT, client_file, read_state
from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.objects_of_config import on_device
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.lab.results.predictions import BATCH, SiteTest
from fedbn_flwr.lab.results.summary import contents_of_model
from fedbn_flwr.lab.results.tests_table import (
    DOMAIN,
    GLOBAL_TESTS,
    HELD_OUT,
    RUNNING,
    Measured,
    site_name,
)
from fedbn_flwr.messages.protocol import VALIDATION
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.server.methods.params import RECALIBRATED, TEST_BN
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.runs.failures import shortened
from fedbn_flwr.server.runs.run_state import Run
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.metrics import confusion
from fedbn_flwr.training.model_state import load_state
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.tasks import Task

logger = logging.getLogger("flwr")

# With more clients, a table with a row for each is of little use, and the tests may
# cost more than the run.
_MOST_SITES = 50
# tests of the global model with some BN entries replaced
_COMPLETED = (SHARED_BN, RECALIBRATED)


def headlines(config: Config) -> list[str]:
    """Return the key of each test's main score. The first is the run's main metric."""
    score = data_of(config).task.score
    tests = method_of(config).tests
    prefixes = {name: test.prefix for name, test in GLOBAL_TESTS.items()}
    return [f"{prefixes.get(name, name)}-{score}" for name in tests]


@dataclass(frozen=True)
class TestedSite:
    """A site at the end of a run.

    Attributes:
        test: the test of the site's model; None if the site was not tested.
        row: the facts for the row of the site in ``summary.json``.
        by_batch: the same test with batch statistics, if the model has them.
    """

    test: SiteTest | None
    row: Mapping[str, Any]
    by_batch: SiteTest | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """The row of the site in ``summary.json``."""
        value = self.test.value if self.test else math.nan
        return {**self.row, "value": value if math.isfinite(value) else None}

    def measured(self, server_round: int, model: str) -> list[Measured]:
        """Return the row of ``tests.csv`` if the site was tested.

        ``model`` is the kind of the models of sites that train, "own" or "global".
        """
        test = self.test
        if test is None:
            return []
        part = "test"
        if test.client is None:
            part, model = HELD_OUT, "global"
        place = (server_round, test.client, test.site, part, test.examples, model)
        return [Measured(*place, test.bn, test.task.score, test.value)]


class Tester:
    """The server's tests of a run.

    After a round, there are two kinds:

    - The tests of ``eval-on`` with the global model, on all test data and by domain.
      ``global-train`` is on the training examples of all clients instead, unchanged by
      augmentation. The first test of ``eval-on`` is repeated on the validation examples
      of all clients.
    - The tests of held-out clients, to show how a model works for new clients:
      ``global`` with the global BN, or ``averaged`` if the clients keep their BN parts;
      ``adapted`` with statistics re-estimated on the client's own training inputs,
      without their targets; and ``test-bn``, if the config has it, with statistics of
      the client's own test inputs.

    Args:
        config: the settings of the run.
        model: receives the entries of each test.
        data: the data, or None if the server has no data; then there is no test.
        domains: the test set of each domain.
        strategy: the run's strategy.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        data: PartitionedData | None,
        domains: Mapping[str, Subset],
        strategy: Strategy,
    ) -> None:
        self._config, self._method = config, method_of(config)
        self._task = data_of(config).test_task
        self._model, self._strategy, self._data = model, strategy, data
        self._parts: dict[str, Subset] = {}
        self._held_out: dict[str, tuple[Subset, Subset]] = {}
        if data:
            self._parts = {
                "test": data.test_view(),
                "train": data.train_view(),
                VALIDATION: data.validation_view(),
            }
            for name, view in domains.items():
                self._parts[f"{DOMAIN}{name}"] = view
            for at, name in enumerate(data.held_out_names):
                self._held_out[name] = data.held_out_views(at)
        _warn_of_untrained(config, strategy)

    def after_round(self, server_round: int, state: State) -> list[Measured]:
        """Return the results of the tests of a round, those of held-out clients last.

        Args:
            server_round: the round of the model.
            state: the global state.
        """
        return [
            *self._of_global_model(server_round, state),
            *self._of_held_out_clients(server_round, state),
        ]

    def _of_global_model(self, server_round: int, state: State) -> Iterator[Measured]:
        """Yield the results of the tests of ``eval-on`` with the global model."""
        if not self._parts.get("test"):
            return
        for name in self._method.tests:
            # Find the entries that this test replaces: averaged BatchNorm, or
            # re-estimated statistics. Skip the test if nothing was averaged or
            # re-estimated. The log has the reason.
            completed = name.removesuffix(TEST_BN)
            entries = self._strategy.run.completing_entries(completed)
            if name not in GLOBAL_TESTS or (completed in _COMPLETED and not entries):
                continue
            load_state(self._model, tensors({**state, **entries}))
            _, tested, bn = GLOBAL_TESTS[name]
            mode = self._config.test_bn if name.endswith(TEST_BN) else ""
            for part, view in self._parts.items():
                first = part == VALIDATION and name == self._method.tests[0]
                more = tested == "test" and (first or part.startswith(DOMAIN))
                if len(view) and (part == tested or more):
                    found = evaluate_adapted(self._model, view, mode, self._task)
                    named = found.metrics if part.startswith(DOMAIN) else found.named()
                    yield from _rows(server_round, "", part, view, bn, named)

    def _of_held_out_clients(
        self, server_round: int, state: State
    ) -> Iterator[Measured]:
        """Yield the results of the tests of held-out clients."""
        task, mode = self._task, self._config.test_bn
        for name, (inputs, view) in self._held_out.items():
            # Test first with the given statistics, then with statistics of the test
            # inputs. Test last with statistics of the training inputs, because these
            # change the model.
            model, bn = self._for_new_client(state)
            found = {bn: evaluate(model, view, task=task)}
            if mode:
                by_tests = evaluate_adapted(model, view, mode, task)
                found[TEST_BN.strip("-")] = by_tests
            moments = reestimate_statistics(
                model, inputs, batch_size=task.test_batch, task=task
            )
            if moments:
                load_statistics(model, moments)
                found["adapted"] = evaluate(model, view, task=task)
            for bn, result in found.items():
                named = result.named()
                yield from _rows(server_round, name, HELD_OUT, view, bn, named)

    def _for_new_client(self, state: State) -> tuple[nn.Module, str]:
        """Return the model for a client that never trained, and its BN statistics."""
        entries = self._strategy.run.completing_entries(SHARED_BN)
        load_state(self._model, tensors({**state, **entries}))
        return self._model, SHARED_BN if entries else RUNNING

    def at_end(
        self,
        state: State,
        run: Path,
        clients: Collection[str],
        names: Mapping[str, str],
    ) -> list[TestedSite]:
        """Return the test of each site at the end of a run, held-out sites last.

        There are no tests if the data are not here, if there are more than 50 sites, if
        single clients are protected, if clients' own models are not on this disk, if the
        main test uses statistics of its inputs, or if it is the loss of pixels.

        Args:
            state: the final global state.
            run: the run's folder.
            clients: the clients whose own model is in the folder.
            names: the clients' names by number.
        """
        data, task, test = self._data, self._task, self._method.tests[0]
        if data is None or self._config.protected or test.endswith(TEST_BN):
            return []
        if not any(map(len, data.test)) or (task.by_pixel and task.score == "loss"):
            return []
        if len(data.test) + len(self._held_out) > _MOST_SITES:
            return []
        if self._method.tests_own_models and not clients:
            return []

        on_device(self._model, self._config)
        bn = test if test in _COMPLETED else RUNNING
        sites = []
        for number in range(len(data.train)):
            name, view = site_name(number, names), data.test_view(number)
            row: dict[str, Any] = {"site": name, "examples": len(view)}
            row["client"] = number
            model, note = self._of_client(str(number), state, run, clients)
            row |= {"note": note} if note else {}
            sites.append(_tested(model, bn, view, task, row))
        for name, (_, view) in self._held_out.items():
            row = {"site": name, "examples": len(view), HELD_OUT: True}
            sites.append(_tested(*self._for_new_client(state), view, task, row))
        self._model.cpu()
        return sites

    def _of_client(
        self, client: str, state: State, run: Path, clients: Collection[str]
    ) -> tuple[nn.Module | None, str]:
        """Return the final model of a client and a remark, or None and the reason.

        It has the global entries, the entries that complete them for this test, and the
        client's own entries.
        """
        strategy, note = self._strategy, ""
        shared = strategy.run.completing_entries(self._method.tests[0])
        entries = tensors({**state, **shared})
        if self._method.tests_own_models and client in clients:
            entries |= read_state(client_file(run, client))[0]
        elif self._method.tests_own_models:
            note = _without_own_model(strategy.run, client)
            # The server's values of entries that stay with the clients are initial.
            if ABSENT in contents_of_model(strategy).values():
                return None, note
        load_state(self._model, entries)
        return self._model, note


def _rows(
    server_round: int,
    site: str,
    part: str,
    view: Subset,
    bn: str,
    named: Mapping[str, float],
) -> Iterator[Measured]:
    """Yield the rows of a test of the global model, given by metric."""
    for metric, value in named.items():
        about = (server_round, None, site, part, len(view), "global", bn)
        yield Measured(*about, metric, value)


def _tested(
    model: nn.Module | None, bn: str, view: Subset, task: Task, row: Mapping[str, Any]
) -> TestedSite:
    """Return the test of a site, also with batch statistics if the model has them."""
    if model is None or not len(view):
        return TestedSite(None, row)
    about = {"site": row["site"], "client": row.get("client")}
    try:
        test = replace(test_site(model, view, task), bn=bn, **about)
    except FedBNError as error:
        logger.warning("site %s was not tested: %s", row["site"], error)
        return TestedSite(None, {**row, "error": str(error)})
    # A model that is right only with batch statistics has a fault.
    by_batch = None
    layers = () if isinstance(task, OwnTask) else layers_of(model).values()
    if test.client is not None and any(one.running_mean is not None for one in layers):
        with suppress(FedBNError):
            again = test_site(adapted(model, BATCH), view, task)
            by_batch = replace(again, bn=BATCH, **about)
    return TestedSite(test, row, by_batch)


def test_site(model: nn.Module, data: Subset, task: Task) -> SiteTest:
    """Return the outputs of the model for the examples of a site.

    Raises:
        FedBNError: the examples cannot be read, or do not fit the task.
    """
    if isinstance(task, OwnTask):  # one value for the whole site
        result = evaluate(model, data, task=task)
        value = torch.tensor([result.named()[task.score]], dtype=torch.float64)
        return SiteTest(task, value, torch.tensor([len(data)]), np.zeros(1, np.int64))
    if task.score != "loss":
        task = replace(task, metrics=(task.score,))
    outputs, targets = [], []

    def keep(of_batch: Tensor, targets_of_batch: Tensor) -> None:
        # For classes of pixels, keep only a confusion matrix of each image, because all
        # outputs would fill the memory.
        if task.by_pixel:
            counts = []
            for row in range(len(of_batch)):
                here = slice(row, row + 1)
                counts.append(
                    confusion(of_batch[here], targets_of_batch[here], task.ignore)
                )
            of_batch = torch.stack(counts)
        outputs.append(of_batch.cpu())
        targets.append(targets_of_batch.cpu())

    evaluate(model, data, task=task, on_batch=keep)
    return SiteTest(task, torch.cat(outputs), torch.cat(targets), _units(data))


test_site.__test__ = False  # type: ignore[attr-defined]  # pytest must not collect it


def _units(data: Subset) -> Indices:
    # Without groups such as patients, each example is a unit of its own.
    return np.arange(len(data)) if data.units is None else data.units.cpu().numpy()


def enough_examples(data: PartitionedData, task: Task) -> Callable[[Measured], bool]:
    """Return a function: whether the test of a client counts in a mean.

    It counts if the client has enough examples. If no client has enough, all count.
    """
    views = {"test": data.test_view, VALIDATION: data.validation_view}
    clients = range(len(data.train))

    @functools.cache
    def counting(part: str, metric: str) -> set[int]:
        if isinstance(task, OwnTask):
            return {*clients}
        scored, found = replace(task, score=metric), set()
        for client in clients:
            view = views[part](client)
            targets = torch.empty(0) if task.by_pixel else view.targets.cpu()
            if not SiteTest(scored, torch.empty(0), targets, _units(view)).too_few:
                found.add(client)
        return found or {*clients}

    # A client in a network may have data that the server has not.
    return lambda test: (
        test.part not in views
        or test.client not in clients
        or test.client in counting(test.part, test.metric)
    )


def _without_own_model(run: Run, client: str) -> str:
    """Return the reason why a client has no model of its own here."""
    if client in run.kept.hashes:
        return "its local state is not on this disk, only the server's entries"
    why = "no reply of it was used"
    for report in run.reports:
        for node_id, reason in report.reasons.items():
            if run.nodes.node(node_id).label == client:
                why = f"round {report.server_round}: {shortened(reason)}"
    return f"no model of its own, only the server's entries; {why}"


def _warn_of_untrained(config: Config, strategy: Strategy) -> None:
    """Warn if a test uses the server's values of entries that stay with the clients."""
    untrained = [name for name in method_of(config).tests if name.startswith("global")]
    if untrained and strategy.methods.local:
        advice = "eval-on=averaged-bn tests with the average of the clients' values."
        # A protection refuses results and entries of single clients, so advise a
        # test at each site.
        if config.protected:
            advice = (
                "After the run each site tests its own model: `fedbn-flwr evaluate"
                " RUN --dataset DATA --state-dir DIR`, with the state-dir of its node."
            )
        logger.warning(
            "eval-on=%s tests the model of the server, but strategy %r keeps %s"
            " with its clients: these entries have their initial values."
            " %s",
            ",".join(untrained),
            strategy.name,
            ", ".join(sorted(strategy.methods.local)),
            advice,
        )

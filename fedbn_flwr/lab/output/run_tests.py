"""The tests of a run.

These are the tests of the global model in ``eval-on``, the means over the tests of
clients that train, and the tests of held-out clients.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fedbn_flwr.batchnorm.adaptation import TestBNMode, evaluate_adapted, try_batches
from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.reestimation import load_statistics, reestimate_statistics
from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.output.summary import CLIENTS, HELD_OUT
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData, domain_test
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, VALIDATION
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.server.methods.params import RECALIBRATED, TEST_BN
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.rounds.testing import completing_entries
from fedbn_flwr.server.runs.round_outcome import RoundOutcome
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.model_state import load_state
from fedbn_flwr.training.tasks import Task

logger = logging.getLogger("flwr")

# tests of the global model with some BN entries replaced
_COMPLETED = (SHARED_BN, RECALIBRATED)
_ON_TRAINING_DATA = "global-train"
_OTHERS = (*_COMPLETED, _ON_TRAINING_DATA, f"global{TEST_BN}", f"{SHARED_BN}{TEST_BN}")
GLOBAL_TESTS = {"global": "test", "global-batch-statistics": "test-batch"}
GLOBAL_TESTS |= {name: f"test-{name}" for name in _OTHERS}
"""Each test of the global model, and the prefix of its metrics."""


def headlines(config: Config) -> list[str]:
    """Return the key of each test's main score. The first is the run's main metric."""
    score = data_of(config).task.score
    tests = method_of(config).tests
    return [f"{GLOBAL_TESTS.get(name, name)}-{score}" for name in tests]


class GlobalTests:
    """The tests of ``eval-on`` with the global model, on all test data and by domain.

    ``global-train`` is on the training examples of all clients instead, unchanged by
    augmentation. The first test of ``eval-on`` is repeated on the validation examples
    of all clients.

    Args:
        config: the settings of the run.
        model: receives the entries of each test.
        data: the data, or None if the server has no data; then there is no test.
        domains: the test set of each domain.
        strategy: None for the centralized reference.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        data: PartitionedData | None,
        domains: Mapping[str, Subset],
        strategy: Strategy | None,
    ) -> None:
        self._config = config
        self._model = model
        self._strategy = strategy
        self._task = data_of(config).test_task
        self._domains = domains
        # None if there are no such examples
        self._test = self._validation = self._train = None
        if data:
            self._test = data.test_view() or None
            self._validation = data.validation_view()
            self._train = data.train_view()
        tests = method_of(config).tests
        self._names = [name for name in tests if name in GLOBAL_TESTS]
        self._first = tests[0]

        # Warn of entries that stay with the clients, because the server's values of
        # these entries are never trained.
        untrained = [name for name in tests if name.startswith("global")]
        if strategy and untrained and strategy.local:
            advice = (
                "eval-on=averaged-bn tests with the average of the clients' values."
            )
            # A protection refuses results and entries of single clients, so advise a
            # test at each site.
            if config.protected:
                advice = (
                    "After the run each site exports and tests its own model:"
                    " `fedbn-flwr export RUN --state-dir DIR`, with the state-dir of its"
                    " node."
                )
            logger.warning(
                "eval-on=%s tests the model of the server, but strategy %r keeps %s"
                " with its clients: these entries have their untrained initial values."
                " %s",
                ",".join(untrained),
                strategy.name,
                ", ".join(sorted(strategy.local)),
                advice,
            )

    def try_batches(self) -> None:
        """Refuse tests now if a batch is too small for its own statistics.

        Raises:
            NormLayerError: a layer gets one value per channel.
        """
        for name in self._names:
            mode = self._mode(name)
            if not mode:  # running statistics do not depend on the batch
                continue
            views = [self._test, *self._domains.values()]
            if name == self._first:
                views.append(self._validation)
            for view in filter(None, views):
                try_batches(self._model, view, mode, self._task)

    def run(
        self, state: State | None
    ) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
        """Return the metrics of all tests, and each metric by domain.

        Args:
            state: the global state to load into the model; None if the model is up to
                date.
        """
        tested: dict[str, Any] = {}
        domains: dict[str, dict[str, float]] = {}
        if self._test is None:
            return tested, domains
        for name in self._names:
            # Find the entries that this test replaces: averaged BatchNorm, or
            # re-estimated statistics.
            completed = name.removesuffix(TEST_BN)
            entries: State = {}
            if self._strategy:
                entries = completing_entries(self._strategy.run, completed)
            # Skip the test if nothing was averaged or re-estimated. The log has the
            # reason.
            if completed in _COMPLETED and not entries:
                continue
            if state is not None:
                load_state(self._model, tensors({**state, **entries}))

            # Choose the way to test, and the examples.
            prefix = GLOBAL_TESTS[name] + "-"
            test = functools.partial(evaluate, self._model, task=self._task)
            mode = self._mode(name)
            if mode:
                test = functools.partial(
                    evaluate_adapted, self._model, mode=mode, task=self._task
                )
            if name == _ON_TRAINING_DATA and self._train:
                tested |= test(self._train).named(prefix)
                continue
            tested |= test(self._test).named(prefix)
            if self._validation and name == self._first:
                tested |= test(self._validation).named(f"{VALIDATION}-")
            for domain, view in self._domains.items():
                metrics = test(view).metrics
                for metric in self._task.metrics:
                    domains.setdefault(prefix + metric, {})[domain] = metrics[metric]
        return tested, domains

    def _mode(self, test: str) -> TestBNMode:
        """Return the kind of BatchNorm statistics in a test, "" for running statistics."""
        if test == "global-batch-statistics":
            return "batch"
        return self._config.test_bn if test.endswith(TEST_BN) else ""


def client_means(report: RoundOutcome, task: Task) -> dict[str, float]:
    """Return each metric of the clients' tests as two means over the clients.

    ``NAME`` is the plain mean (arXiv:2301.02982, 6.2.1). ``NAME-weighted`` is the mean
    weighted by the clients' test examples. A client whose test set does not define the
    metric is left out. Then ``NAME-clients`` is the number of clients in the mean.
    """
    line: dict[str, float] = {}
    tests = ("own", "global", VALIDATION)
    metrics = dict.fromkeys(("accuracy", "loss", *task.metrics))
    for name, what in itertools.product(tests, metrics):
        # Collect the values of the clients that have the metric, and the number of
        # their test examples.
        key = f"personal-{name}-{what}"
        values = []
        weights = []
        undefined = False
        for of_client in report.evaluations.values():
            value = of_client.get(f"{name}-{what}")
            count = of_client.get(f"{name}-{NUM_EXAMPLES}", 0)
            if value is None or count <= 0:
                continue
            # A NaN with a finite loss is an undefined metric, and it is left out. A NaN
            # with a non-finite loss shows divergence, and it counts.
            if math.isnan(value) and math.isfinite(of_client.get(f"{name}-loss", 0.0)):
                undefined = True
            else:
                values.append(value)
                weights.append(count)

        if undefined:
            line[key + CLIENTS] = len(values)
        if values:
            line[key] = _mean(values)
            total = sum(map(operator.mul, values, weights))
            line[f"{key}-weighted"] = total / sum(weights)
        elif undefined:
            line[key] = math.nan
    return line


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def client_means_by_domain(
    report: RoundOutcome, domain_of: Callable[[int], str | None], task: Task
) -> dict[str, dict[str, float]]:
    """Return each metric of the clients' own tests, as a plain mean for each domain."""
    tests: dict[str, list[Mapping[str, Any]]] = {}
    for client, metrics in report.evaluations.items():
        domain = domain_of(int(client))
        if domain and metrics.get(f"own-{NUM_EXAMPLES}", 0) > 0:
            tests.setdefault(domain, []).append(metrics)
    if not tests:
        return {}
    means: dict[str, dict[str, float]] = {}
    for name in task.metrics:
        by_domain = means[f"personal-own-{name}"] = {}
        for domain, of_clients in tests.items():
            values = [metrics[f"own-{name}"] for metrics in of_clients]
            defined = [value for value in values if not math.isnan(value)]
            by_domain[domain] = _mean(defined or values)
    return means


def tested_at_clients(
    model: nn.Module, data: PartitionedData, tests: Sequence[str], task: Task
) -> dict[str, dict[str, Any]]:
    """Return the metrics of one model by client, as clients reply their tests.

    Args:
        model: the model. It does not change.
        data: the data of all clients.
        tests: the names of the test sets.
        task: the learning task.
    """
    # All clients have these test sets, so make each of them once.
    shared = {"global": data.test_view()}
    for domain, view in data.domain_views().items():
        shared[domain_test(domain)] = view
    of_all = {}
    for name in tests:
        if name in shared:
            of_all[name] = _named(name, model, shared[name], task)

    tested: dict[str, dict[str, Any]] = {}
    for client in range(len(data.train)):
        own = {"own": data.test_view(client), VALIDATION: data.validation_view(client)}
        results = tested[str(client)] = {}
        for name in tests:
            results |= of_all.get(name) or _named(name, model, own[name], task)
    return tested


def _named(name: str, model: nn.Module, view: Subset, task: Task) -> dict[str, Any]:
    metrics = evaluate(model, view, task=task).named(f"{name}-") if len(view) else {}
    return {**metrics, f"{name}-{NUM_EXAMPLES}": len(view)}


class HeldOut:
    """The tests of held-out clients, to show how a model works for new clients.

    Each client is tested after every tested round:

    - ``global``: with the global BN. If the clients keep their BN parts, the test is
      ``averaged`` instead, with the average of these parts.
    - ``adapted``: with statistics re-estimated on the client's own training inputs,
      without their targets.
    - ``test-bn``: if the config has ``test-bn``, with statistics of the client's own
      test inputs (see ``batchnorm.adaptation``).

    Args:
        data: the run's data, with held-out clients.
        task: the learning task.
        mode: the setting ``test-bn``, for one more test; "" for no such test.
    """

    def __init__(
        self, data: PartitionedData, task: Task, mode: TestBNMode = ""
    ) -> None:
        self._task = task
        self._mode = mode
        self._clients = {
            name: data.held_out_views(at) for at, name in enumerate(data.held_out_names)
        }

    def try_batches(self, model: nn.Module) -> None:
        """Refuse tests now if a batch is too small for its own statistics.

        Raises:
            NormLayerError: a layer gets one value per channel.
        """
        for _, tests in self._clients.values():
            try_batches(model, tests, self._mode, self._task)

    def test(
        self, model: nn.Module, state: State, strategy: Strategy | None
    ) -> dict[str, Any]:
        """Return the tests of each client by name, and means over the clients.

        Args:
            model: receives the entries of each test; it keeps the last entries.
            state: the global model's state.
            strategy: the run's strategy; None for the centralized reference.
        """
        entries = completing_entries(strategy.run, SHARED_BN) if strategy else {}
        which = "averaged" if entries else "global"
        task = self._task
        results: dict[str, dict[str, Any]] = {}
        for name, (inputs, tests) in self._clients.items():
            # Test first with the given statistics, then with statistics of the test
            # inputs. Test last with statistics of the training inputs, because these
            # change the model.
            load_state(model, tensors({**state, **entries}))
            metrics: dict[str, Any] = {NUM_EXAMPLES: len(tests)}
            metrics |= evaluate(model, tests, task=task).named(f"{which}-")
            if self._mode:
                adapted = evaluate_adapted(model, tests, self._mode, task)
                metrics |= adapted.named(f"{TEST_BN.strip('-')}-")
            moments = reestimate_statistics(model, inputs, batch_size=task.test_batch)
            if moments:
                load_statistics(model, moments)
                metrics |= evaluate(model, tests, task=task).named("adapted-")
            results[name] = metrics
        return {HELD_OUT: results, **_means(results)}


def _means(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return each metric's plain mean over the clients that define it."""
    values: dict[str, list[float]] = {}
    for metrics in results.values():
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    values.pop(NUM_EXAMPLES, None)
    means: dict[str, float] = {}
    for name, of_clients in values.items():
        defined = [value for value in of_clients if not math.isnan(value)]
        if defined:
            means[f"{HELD_OUT}-{name}"] = _mean(defined)
        if len(defined) < len(results):
            means[f"{HELD_OUT}-{name}{CLIENTS}"] = len(defined)
    return means

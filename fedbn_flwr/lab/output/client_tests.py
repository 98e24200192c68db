"""The tests of clients: means over those that train, tests of those that never do."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fedbn_flwr.batchnorm.adaptation import TestBNMode, evaluate_adapted, try_batches
from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.reestimation import load_statistics, reestimate_statistics
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.output.summary import CLIENTS, HELD_OUT
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData, domain_test
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, VALIDATION
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.server.methods.params import TEST_BN
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.rounds.testing import completing_entries
from fedbn_flwr.server.runs.report import RoundReport
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.tasks import Task
from fedbn_flwr.training.wrappers import load_state

__all__ = ["HeldOut", "client_means", "client_means_by_domain", "tested_at_clients"]


def client_means(report: RoundReport, task: Task) -> dict[str, float]:
    """Return each metric of the clients' tests as two means over the clients.

    ``NAME`` is the plain mean (arXiv:2301.02982, 6.2.1), ``NAME-weighted`` the mean
    weighted by the clients' test examples. A client whose test set does not define the
    metric is left out; if there is one, ``NAME-clients`` is the number of the others.
    """
    line: dict[str, float] = {}
    tests = ("own", "global", VALIDATION)
    metrics = dict.fromkeys(("accuracy", "loss", *task.metrics))
    for name, what in itertools.product(tests, metrics):
        # The values of the clients that have the metric, and their test examples.
        key = f"personal-{name}-{what}"
        values = []
        weights = []
        undefined = False
        for of_client in report.evaluations.values():
            value = of_client.get(f"{name}-{what}")
            count = of_client.get(f"{name}-{NUM_EXAMPLES}", 0)
            if value is None or count <= 0:
                continue
            # With a loss that is not finite, NaN says that the model diverged.
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
    report: RoundReport, domain_of: Callable[[int], str | None], task: Task
) -> dict[str, dict[str, float]]:
    """Return each metric of the clients' own tests, as a plain mean by domain."""
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
    """Return the tests of one model at each client, as a client replies them.

    Args:
        model: the model, which stays as it is.
        data: the data of all clients.
        tests: the names of the test sets.
        task: the learning task.
    """
    # Test sets that all clients have are tested once.
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
    """The tests of the clients that never train: how a model works for somebody new.

    Each is tested after every tested round: with the global BN (``global``), or the
    average of the clients' BN parts where these stay with the clients (``averaged``);
    with statistics re-estimated on its own training inputs, no target used
    (``adapted``); and, where the config has ``test-bn``, with statistics of its own
    test inputs (``test-bn``, see ``batchnorm.adaptation``).

    Args:
        data: the run's data, with held-out clients.
        task: the learning task.
        mode: ``test-bn``, of one more test; "" = there is none.
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
        """Refuse now tests in which a batch is too small for its own statistics.

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
            model: gets other entries and keeps the last ones.
            state: the global model's state.
            strategy: knows the clients' BN parts; None for the centralized reference.
        """
        entries = completing_entries(strategy.run, SHARED_BN) if strategy else {}
        which = "averaged" if entries else "global"
        task = self._task
        results: dict[str, dict[str, Any]] = {}
        for name, (inputs, tests) in self._clients.items():
            # As the model is; with statistics of its test inputs; then, last, as this
            # changes the model, with statistics of its training inputs.
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

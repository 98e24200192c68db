"""The tests of the clients in one figure each: means over the clients, over all and by domain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fedbn_flwr.lab.output.definitions import CLIENTS
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, VALIDATION
from fedbn_flwr.server.report import RoundReport
from fedbn_flwr.training.tasks import Task

__all__ = ["client_means", "client_means_by_domain"]


def client_means(report: RoundReport, trained: Collection[str], task: Task) -> dict[str, float]:
    """Return each metric of the clients' tests: its plain mean over the clients (arXiv:2301.02982, 6.2.1) and others.

    ``NAME`` is the plain mean, ``NAME-weighted`` the mean weighted by the clients' test examples. ``NAME-seen`` is the
    plain mean over the clients that have trained in this run, ``NAME-unseen`` over the others. A client whose test set
    does not define the metric is left out; if there is one, ``NAME-clients`` is the number of the others.
    """
    results: dict[str, list[_Result]] = {}
    undefined: set[str] = set()
    metrics_of_task = dict.fromkeys(("accuracy", "loss", *task.metrics))
    for client, metrics in report.evaluations.items():
        for name, what in itertools.product(("own", "global", VALIDATION), metrics_of_task):
            key, count = f"personal-{name}-{what}", metrics.get(f"{name}-{NUM_EXAMPLES}", 0)
            value = metrics.get(f"{name}-{what}")
            if value is None or count <= 0:
                continue
            of_key = results.setdefault(key, [])
            # With a loss that is not finite, NaN says that the model diverged.
            if math.isnan(value) and math.isfinite(metrics.get(f"{name}-loss", 0.0)):
                undefined.add(key)
            else:
                of_key.append(_Result(value, count, client in trained))
    line: dict[str, float] = {}
    for key, of_key in results.items():
        if key in undefined:
            line[key + CLIENTS] = len(of_key)
        if not of_key:
            line[key] = math.nan
            continue
        line[key] = _mean([result.value for result in of_key])
        examples = sum(result.examples for result in of_key)
        line[f"{key}-weighted"] = sum(result.value * result.examples for result in of_key) / examples
        for suffix, wanted in (("seen", True), ("unseen", False)):
            if group := [result.value for result in of_key if result.trained == wanted]:
                line[f"{key}-{suffix}"] = _mean(group)
    return line


class _Result(NamedTuple):
    """A client's test: the metric, the number of test examples, and whether the client has trained."""

    value: float
    examples: float
    trained: bool


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def client_means_by_domain(
    report: RoundReport, domain_of: Callable[[int], str | None], task: Task
) -> dict[str, dict[str, float]]:
    """Return the plain mean, over the clients of each domain, of each metric on their own test data."""
    tests: dict[str, list[Mapping[str, Any]]] = {}
    for client, metrics in report.evaluations.items():
        if metrics.get(f"own-{NUM_EXAMPLES}", 0) > 0 and (domain := domain_of(int(client))):
            tests.setdefault(domain, []).append(metrics)
    means: dict[str, dict[str, float]] = {}
    for name in task.metrics if tests else ():
        by_domain = means[f"personal-own-{name}"] = {}
        for domain, of_clients in tests.items():
            values = [metrics[f"own-{name}"] for metrics in of_clients]
            by_domain[domain] = _mean([value for value in values if not math.isnan(value)] or values)
    return means

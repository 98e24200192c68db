"""The tests of the clients in one figure each: means over the clients, over all and by domain."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

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
    values: dict[str, list[tuple[float, float, bool]]] = {}  # value, test examples, has trained
    undefined: set[str] = set()
    for client, metrics in report.evaluations.items():
        for name in ("own", "global", VALIDATION):
            for what in dict.fromkeys(("accuracy", "loss", *task.metrics)):
                count = metrics.get(f"{name}-{NUM_EXAMPLES}", 0)
                if f"{name}-{what}" in metrics and count > 0:
                    key, value = f"personal-{name}-{what}", metrics[f"{name}-{what}"]
                    found = values.setdefault(key, [])
                    if math.isnan(value) and math.isfinite(metrics.get(f"{name}-loss", 0.0)):
                        undefined.add(key)
                    else:  # NaN with such a loss: the model diverged
                        found.append((value, count, client in trained))
    line: dict[str, float] = {}
    for key, found in values.items():
        if key in undefined:
            line[key + CLIENTS] = len(found)
        if not found:
            line[key] = math.nan
            continue
        line[key] = _mean([value for value, _, _ in found])
        line[f"{key}-weighted"] = sum(value * count for value, count, _ in found) / sum(n for _, n, _ in found)
        for suffix, wanted in (("seen", True), ("unseen", False)):
            if group := [value for value, _, seen in found if seen == wanted]:
                line[f"{key}-{suffix}"] = _mean(group)
    return line


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
    found: dict[str, dict[str, float]] = {}
    for name in task.metrics if tests else ():
        values = {domain: [m[f"own-{name}"] for m in own] for domain, own in tests.items()}
        defined = {domain: [n for n in numbers if not math.isnan(n)] for domain, numbers in values.items()}
        found[f"personal-own-{name}"] = {d: _mean(defined[d] or numbers) for d, numbers in values.items()}
    return found

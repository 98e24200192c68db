"""The tests of the global model that ``eval-on`` asks for."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedbn_flwr.batchnorm.adaptation import TestBNMode, evaluate_adapted, try_batches
from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.messages.protocol import VALIDATION
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.server.methods.params import RECALIBRATED, TEST_BN
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.rounds.testing import completing_entries
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training.wrappers import load_state

__all__ = ["GLOBAL_TESTS", "GlobalTests", "headlines"]

logger = logging.getLogger("flwr")

# tests of the global model with some BN entries replaced
_COMPLETED = (SHARED_BN, RECALIBRATED)
_ON_TRAINING_DATA = "global-train"
_OTHERS = (*_COMPLETED, _ON_TRAINING_DATA, f"global{TEST_BN}", f"{SHARED_BN}{TEST_BN}")
GLOBAL_TESTS = {"global": "test", "global-batch-statistics": "test-batch"}
GLOBAL_TESTS |= {name: f"test-{name}" for name in _OTHERS}
"""Each test of the global model, and the prefix of its metrics."""


def headlines(config: Config) -> list[str]:
    """Return the key of the main score of each test; the first is the run's metric."""
    score = data_of(config).task.score
    tests = method_of(config).tests
    return [f"{GLOBAL_TESTS.get(name, name)}-{score}" for name in tests]


class GlobalTests:
    """The tests of ``eval-on`` with the global model, on all test data and by domain.

    ``global-train`` is on the training examples of all clients instead, as they are,
    without augmentation. The first test of ``eval-on`` is done on the validation
    examples of all clients, too.

    Args:
        config: the settings of the run.
        model: gets the entries that are tested.
        data: None = the server has no data, and there are no tests.
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
        # None where there are no such examples
        self._test = self._validation = self._train = None
        if data:
            self._test = data.test_view() or None
            self._validation = data.validation_view()
            self._train = data.train_view()
        tests = method_of(config).tests
        self._names = [name for name in tests if name in GLOBAL_TESTS]
        self._first = tests[0]

        # Entries that stay with the clients are never trained at the server.
        untrained = [name for name in tests if name.startswith("global")]
        if strategy and untrained and strategy.local:
            logger.warning(
                "eval-on=%s tests the model of the server, and strategy %r keeps %s"
                " with its clients: these entries have their initial values, which are"
                " not trained. eval-on=averaged-bn tests with the average of the"
                " clients' values.",
                ",".join(untrained),
                strategy.name,
                ", ".join(sorted(strategy.local)),
            )

    def try_batches(self) -> None:
        """Refuse now tests in which a batch is too small for its own statistics.

        Raises:
            NormLayerError: a layer gets one value per channel.
        """
        for name in self._names:
            views = [self._test, *self._domains.values()]
            if name == self._first:
                views.append(self._validation)
            for view in filter(None, views):
                try_batches(self._model, view, self._mode(name), self._task)

    def run(
        self, state: State | None
    ) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
        """Return the metrics of all tests, and each metric by domain.

        Args:
            state: the global state, which is loaded into the model; None = the model is
                up to date.
        """
        tested: dict[str, Any] = {}
        domains: dict[str, dict[str, float]] = {}
        if self._test is None:
            return tested, domains
        for name in self._names:
            # The entries of this test: BatchNorm's average, or re-estimated statistics.
            completed = name.removesuffix(TEST_BN)
            entries: State = {}
            if self._strategy:
                entries = completing_entries(self._strategy.run, completed)
            # no statistics were re-estimated or shared; the log gives the reason
            if completed in _COMPLETED and not entries:
                continue
            if state is not None:
                load_state(self._model, tensors({**state, **entries}))

            # Its examples.
            prefix = GLOBAL_TESTS[name] + "-"
            test = functools.partial(
                evaluate_adapted, self._model, mode=self._mode(name), task=self._task
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
        """Return the BatchNorm statistics of a test; "" = the running ones."""
        if test == "global-batch-statistics":
            return "batch"
        return self._config.test_bn if test.endswith(TEST_BN) else ""

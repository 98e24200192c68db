"""The tests that the server does: of the global model, and at held-out clients."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn

from fedbn_flwr.batchnorm.adaptation import TestBNMode, evaluate_adapted
from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.reestimation import load_statistics, reestimate_statistics
from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.lab.results.tests_table import (
    DOMAIN,
    GLOBAL_TESTS,
    HELD_OUT,
    RUNNING,
    Measured,
)
from fedbn_flwr.messages.protocol import VALIDATION
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.server.methods.params import RECALIBRATED, TEST_BN
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.model_state import load_state
from fedbn_flwr.training.tasks import Task

logger = logging.getLogger("flwr")

# tests of the global model with some BN entries replaced
_COMPLETED = (SHARED_BN, RECALIBRATED)


def headlines(config: Config) -> list[str]:
    """Return the key of each test's main score. The first is the run's main metric."""
    score = data_of(config).task.score
    tests = method_of(config).tests
    prefixes = {name: test.prefix for name, test in GLOBAL_TESTS.items()}
    return [f"{prefixes.get(name, name)}-{score}" for name in tests]


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
        if untrained and strategy.methods.local:
            advice = (
                "eval-on=averaged-bn tests with the average of the clients' values."
            )
            # A protection refuses results and entries of single clients, so advise a
            # test at each site.
            if config.protected:
                advice = (
                    "After the run each site tests its own model: `fedbn-flwr evaluate"
                    " RUN --state-dir DIR`, with the state-dir of its node."
                )
            logger.warning(
                "eval-on=%s tests the model of the server, but strategy %r keeps %s"
                " with its clients: these entries have their untrained initial values."
                " %s",
                ",".join(untrained),
                strategy.name,
                ", ".join(sorted(strategy.methods.local)),
                advice,
            )

    def run(self, server_round: int, state: State) -> list[Measured]:
        """Return the results of all tests.

        Args:
            server_round: the round of the model.
            state: the global state to load into the model.
        """
        results: list[Measured] = []
        if self._test is None:
            return results
        for name in self._names:
            # Find the entries that this test replaces: averaged BatchNorm, or
            # re-estimated statistics.
            completed = name.removesuffix(TEST_BN)
            entries = self._strategy.run.completing_entries(completed)
            # Skip the test if nothing was averaged or re-estimated. The log has the
            # reason.
            if completed in _COMPLETED and not entries:
                continue
            load_state(self._model, tensors({**state, **entries}))

            # Choose the examples, and test with each of them.
            _, part, bn = GLOBAL_TESTS[name]
            views = {part: self._test}
            if part == "train":
                views = {part: self._train} if self._train else {}
            else:
                if self._validation and name == self._first:
                    views[VALIDATION] = self._validation
                views |= {f"{DOMAIN}{key}": view for key, view in self._domains.items()}
            mode = self._config.test_bn if name.endswith(TEST_BN) else ""
            for where, view in views.items():
                test = evaluate_adapted(self._model, view, mode, self._task)
                named = test.metrics if where.startswith(DOMAIN) else test.named()
                about = (server_round, None, "", where, len(view), "global", bn)
                results += [Measured(*about, *item) for item in named.items()]
        return results


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

    def test(
        self, server_round: int, model: nn.Module, state: State, strategy: Strategy
    ) -> list[Measured]:
        """Return the results of all tests.

        Args:
            server_round: the round of the model.
            model: receives the entries of each test; it keeps the last entries.
            state: the global model's state.
            strategy: the run's strategy.
        """
        entries = strategy.run.completing_entries(SHARED_BN)
        task = self._task
        results: list[Measured] = []
        for name, (inputs, tests) in self._clients.items():
            # Test first with the given statistics, then with statistics of the test
            # inputs. Test last with statistics of the training inputs, because these
            # change the model.
            load_state(model, tensors({**state, **entries}))
            found = {
                SHARED_BN if entries else RUNNING: evaluate(model, tests, task=task)
            }
            if self._mode:
                adapted = evaluate_adapted(model, tests, self._mode, task)
                found[TEST_BN.strip("-")] = adapted
            moments = reestimate_statistics(model, inputs, batch_size=task.test_batch)
            if moments:
                load_statistics(model, moments)
                found["adapted"] = evaluate(model, tests, task=task)
            for bn, result in found.items():
                place = (server_round, None, name, HELD_OUT)
                about = (*place, len(tests), "global", bn)
                results += [Measured(*about, *item) for item in result.named().items()]
        return results

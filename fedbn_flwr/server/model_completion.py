"""The model that is tested and that a run returns: the global one, completed by BN entries that it does not have.

These are averages of BN parts that stay with the clients (``server.shared_bn``), or re-estimated statistics
(``server.recalibration``). Training does not see them.
"""

from __future__ import annotations

import logging
from typing import Any

from flwr.app import ArrayRecord

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.server.method import Method
from fedbn_flwr.server.params import RECALIBRATED
from fedbn_flwr.server.run_state import RunState
from fedbn_flwr.server.shared_bn import SHARED_BN

__all__ = ["ModelCompletion"]

logger = logging.getLogger("flwr")


class ModelCompletion:
    """Completes the global model of a run, and warns where a test or the result has initial values instead.

    Args:
        method: the method, and its settings.
        run: the run, with the clients' BN parts and the re-estimated statistics.
    """

    def __init__(self, method: Method[Any], run: RunState) -> None:
        self._method = method
        self._run = run
        self._averages = SHARED_BN in method.tests

    def entries(self, test: str) -> State:
        """Return the entries that replace the global ones in test "recalibrated" or "averaged-bn"; else empty.

        Those of "recalibrated" exist after ``configure_evaluate`` of a round with a test.
        """
        if test == SHARED_BN and self._averages:
            return self._run.latest_bn.average(self._run.parts, self._method.params.variance)
        return self._run.reestimated if test == RECALIBRATED else {}

    def complete(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model with the averages, if a test asks for them, and as ``recalibrate`` returns it."""
        return self.with_statistics(_replaced(arrays, self.entries(SHARED_BN)))

    def with_statistics(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model with re-estimated statistics, if every test uses them."""
        return _replaced(arrays, self._run.reestimated) if self._method.recalibrates else arrays

    def for_evaluate_fn(self, server_round: int, arrays: ArrayRecord, reestimated: bool) -> ArrayRecord:
        """Return the completed model for the test after a round; warn of what it lacks.

        Args:
            server_round: the round; 0 = before the first.
            arrays: the global model.
            reestimated: whether statistics are re-estimated after this round.
        """
        if self._method.recalibrates and server_round and not reestimated:
            logger.warning(
                "round %d: the model of evaluate_fn and on_round_end has statistics that are not re-estimated: that is "
                "done after every %d rounds, with eval_every=1 after each",
                server_round,
                self._method.params.eval_every,
            )
        if self._averages and server_round and not self.entries(SHARED_BN):
            logger.warning(
                "round %d: no client has shared its BN parts: they are not trained in the test of the global model",
                server_round,
            )
        return self.complete(arrays)

    def warn_of_initial_values(self) -> None:
        """Warn, before the first round, if entries that stay with the clients are not averaged."""
        if not self._averages and (stay := self._run.parts.select(self._method.local)):
            average = "eval_on='averaged-bn' puts the average of the clients' values there; "
            logger.warning(
                "strategy %r keeps %d entries of the model with its clients (%r, ...): in evaluate_fn and in the final "
                "arrays they have their initial values, which are not trained. %sevaluation on the clients tests each "
                "with its own.",
                self._method.name,
                len(stay),
                stay[0],
                "" if Part.REST in self._method.local else average,
            )

    def warn_of_own_start(self) -> None:
        """Warn that only our ``start`` completes the model of ``evaluate_fn`` and of the result."""
        if self._averages or self._method.recalibrates:
            logger.warning(
                "strategy %r re-estimates or averages BN entries for tests, and this run has a start() of your own: "
                "there evaluate_fn and the result do not have them. After configure_evaluate call "
                "strategy.for_evaluate_fn(server_round, arrays), which returns the model with them, or pass "
                "on_round_end= to the strategy.",
                self._method.name,
            )

    def warn_of_nothing_shared(self) -> None:
        """Warn, after the last round, if averages are asked for and there are none."""
        if self._averages and not self.entries(SHARED_BN):
            logger.warning(
                "no client has shared its BN parts, which eval_on='averaged-bn' asks for: in the returned arrays they "
                "have their initial values. A client with a training loop of its own shares them if it trains inside "
                "`with bn_rules(...)`."
            )


def _replaced(arrays: ArrayRecord, entries: State) -> ArrayRecord:
    """Return the record with ``entries`` replaced."""
    return ArrayRecord({**arrays, **to_record(entries)}) if entries else arrays

"""Whether a run works: it may diverge, or have no round with enough usable replies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from flwr.serverapp.strategy import Result

from fedbn_flwr.errors import DivergedError, NothingTrainedError
from fedbn_flwr.server.failures import account, all_not_finite, divergence, nothing_trained
from fedbn_flwr.server.method import Method
from fedbn_flwr.server.run_state import RunState

__all__ = ["RunHealth"]

logger = logging.getLogger("flwr")


class RunHealth:
    """Notes in the reports of a run what fails, and says whether the run ends for it.

    Args:
        method: the method, and its settings.
        run: the run.
    """

    def __init__(self, method: Method[Any], run: RunState) -> None:
        self._method = method
        self._run = run

    @property
    def ends_run(self) -> bool:
        """Whether the run ends after this round because it diverged."""
        stops = self._method.params.on_divergence == "stop"
        return stops and bool(self._run.reports) and bool(self._run.report.diverged)

    def note_losses(self, losses: Sequence[str], since: int | None = None) -> None:
        """Note and log that losses of this round are not finite.

        Args:
            losses: the losses in words (``losses_not_finite``); empty = all are finite.
            since: the round in which this began; None = this round.
        """
        report = self._run.report
        if losses:
            known = any(earlier.diverged for earlier in self._run.reports[-2:])
            report.diverged += [loss for loss in losses if loss not in report.diverged]
            report.diverged_at = min(since or report.server_round, report.diverged_at or report.server_round)
            advice = [] if known else self._method.divergence_advice(report.server_round)
            logger.error("%s", " ".join([f"round {report.server_round} diverged: {'; '.join(losses)}.", *advice]))

    def note_too_few(self, num_usable: int) -> None:
        """Note and log a round with too few usable replies, and divergence where all replies are not finite."""
        report = self._run.report
        report.kept_previous = True
        logger.warning(
            "round %d: %d usable replies, %d needed (min_replies): the previous global model is kept. %s.",
            report.server_round,
            num_usable,
            self._method.params.min_replies,
            account([report]),
        )
        latest = self._run.reports[-2:]
        if all(map(all_not_finite, latest)) and (len(latest) == 2 or self._run.num_rounds == 1):
            since = latest[0].diverged_at or latest[0].server_round
            self.note_losses([f"since round {since} all replies hold values that are not finite"], since)

    def raise_if_ends(self, result: Result | None = None) -> None:
        """Raise DivergedError, with the result so far, if the run ends because it diverged."""
        if self.ends_run:
            report = self._run.report
            advice = " ".join(self._method.divergence_advice(report.server_round))
            raise DivergedError(divergence(report, advice), report.diverged_at, result)

    def raise_if_failed(self, result: Result) -> None:
        """Raise DivergedError or NothingTrainedError, with the result, if the finished run is one."""
        self.raise_if_ends(result)
        reports = self._run.reports
        # A resumed run may have trained before: its earlier rounds are not known here.
        trains = self._method.fraction_train > 0 and not self._run.after
        # A run that continues after divergence may have no usable reply for that reason alone.
        diverged = any(report.diverged for report in reports)
        if reports and trains and not diverged and all(report.kept_previous for report in reports):
            raise NothingTrainedError(nothing_trained(self._method.params.min_replies, reports), result)

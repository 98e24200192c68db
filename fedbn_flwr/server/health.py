"""Whether a run works: it may diverge, or have no round with enough usable replies."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from flwr.serverapp.strategy import Result

from fedbn_flwr.errors import DivergedError, NothingTrainedError
from fedbn_flwr.server.failures import account, all_not_finite, divergence, nothing_trained
from fedbn_flwr.server.run import Run

__all__ = ["ends_run", "note_losses", "note_too_few", "raise_if_ends", "raise_if_failed"]

logger = logging.getLogger("flwr")


def ends_run(run: Run) -> bool:
    """Return whether the run ends after this round because it diverged."""
    stops = run.methods.params.on_divergence == "stop"
    return stops and bool(run.reports) and bool(run.report.diverged)


def note_losses(run: Run, losses: Sequence[str], since: int | None = None) -> None:
    """Note in the report, and log, that losses of this round are not finite.

    Args:
        run: the run.
        losses: the losses in words (``losses_not_finite``); empty = all are finite.
        since: the round in which this began; None = this round.
    """
    if not losses:
        return
    report = run.report
    known = any(earlier.diverged for earlier in run.reports[-2:])
    report.diverged += [loss for loss in losses if loss not in report.diverged]
    report.diverged_at = min(since or report.server_round, report.diverged_at or report.server_round)
    advice = [] if known else run.methods.advice(run.states, report.server_round)
    logger.error("%s", " ".join([f"round {report.server_round} diverged: {'; '.join(losses)}.", *advice]))


def note_too_few(run: Run, num_usable: int) -> None:
    """Note and log a round with too few usable replies, and divergence where all replies are not finite."""
    report = run.report
    report.kept_previous = True
    logger.warning(
        "round %d: %d usable replies, %d needed (min_replies): the previous global model is kept. %s.",
        report.server_round,
        num_usable,
        run.methods.params.min_replies,
        account([report]),
    )
    latest = run.reports[-2:]
    if all(map(all_not_finite, latest)) and (len(latest) == 2 or run.num_rounds == 1):
        since = latest[0].diverged_at or latest[0].server_round
        note_losses(run, [f"since round {since} all replies hold values that are not finite"], since)


def raise_if_ends(run: Run, result: Result | None = None) -> None:
    """Raise DivergedError, with the result so far, if the run ends because it diverged."""
    if ends_run(run):
        report = run.report
        advice = " ".join(run.methods.advice(run.states, report.server_round))
        raise DivergedError(divergence(report, advice), report.diverged_at, result)


def raise_if_failed(run: Run, result: Result) -> None:
    """Raise DivergedError or NothingTrainedError, with the result, if the finished run is one."""
    raise_if_ends(run, result)
    # A resumed run may have trained before: its earlier rounds are not known here.
    trains = run.options.fraction_train > 0 and not run.after
    # A run that continues after divergence may have no usable reply for that reason alone.
    diverged = any(report.diverged for report in run.reports)
    if run.reports and trains and not diverged and all(report.kept_previous for report in run.reports):
        raise NothingTrainedError(nothing_trained(run.methods.params.min_replies, run.reports), result)

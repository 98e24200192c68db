"""Failures: error replies, losses that are not finite, rounds without enough usable
replies, and runs that end so.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.serverapp.strategy import Result

from fedbn_flwr.errors import (
    NOT_FINITE,
    TOO_FEW_LEFT,
    DivergedError,
    NothingTrainedError,
)
from fedbn_flwr.messages.protocol import NUM_EXAMPLES
from fedbn_flwr.server.runs.report import RoundReport
from fedbn_flwr.server.runs.run import Run

__all__ = [
    "account",
    "all_not_finite",
    "divergence",
    "ends_run",
]
__all__ += [
    "losses_not_finite",
    "note_losses",
    "note_too_few",
    "nothing_trained",
    "raise_if_ends",
    "raise_if_failed",
]
__all__ += ["raise_if_nothing_trains", "training_losses"]

logger = logging.getLogger("flwr")

_NODE = re.compile(r"\bnode \d+( \(partition \d+\))?: ")
# rounds without a usable reply from the start on, where the number of rounds is not
# known
_PATIENCE = 2
_LONGEST = 300  # characters of a reason; the end of a traceback says most


def all_not_finite(report: RoundReport) -> bool:
    """Return whether training gave only values that are not finite, and for this reason
    no reply was usable.
    """
    # If too few clients are left for a synchronised step, the others' values are why.
    codes = [
        report.codes.get(node_id, set()) & {NOT_FINITE, TOO_FEW_LEFT}
        for node_id in report.rejected
    ]
    return not report.participants and bool(codes) and all(codes)


def losses_not_finite(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the losses that are not finite, in words.

    Args:
        metrics: metrics by the label of the client; "" = the server's. A loss is a
            metric whose name ends in "loss". A test in which no target counts has no
            loss: its accuracy (or acc) is NaN, too, or it has no examples.
    """
    clients_of: dict[str, list[str]] = {}
    for label, values in metrics.items():
        losses = [name for name in values if name.endswith("loss")]
        # "loss" repeats the first of several tests
        for name in [name for name in losses if name != "loss"] or losses:
            loss, prefix = values[name], name.removesuffix("loss")
            accuracy = values.get(f"{prefix}accuracy", values.get(f"{prefix}acc", 0.0))
            tested = not isinstance(accuracy, float) or not math.isnan(accuracy)
            tested = tested and values.get(f"{prefix}{NUM_EXAMPLES}") != 0
            if tested and isinstance(loss, float) and not math.isfinite(loss):
                clients_of.setdefault(name, []).append(label or str(loss))
    return [
        (
            f"{name} is {who[0]}"
            if "" in metrics
            else f"{name} of client {_listed(who)} is not finite"
        )
        for name, who in clients_of.items()
    ]


def training_losses(
    metrics: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Return the metrics of the clients' training without losses of something else:
    "loss" and "train...loss" stay.

    Another loss, as of validation data that a client does not have, may be NaN.
    """
    losses = {
        name for values in metrics.values() for name in values if name.endswith("loss")
    }
    others = {name for name in losses if not re.fullmatch("(train.*)?loss", name)}
    return {
        label: {name: values[name] for name in values if name not in others}
        for label, values in metrics.items()
    }


def divergence(report: RoundReport, advice: str) -> str:
    """Return the message for a run that diverged, given the report of its last round,
    and cause and remedies.
    """
    losses = "; ".join(report.diverged)
    return (
        f"the run diverged in round {report.diverged_at}: {losses}. {advice} A run goes"
        " on with on_divergence='continue' as an argument of the strategy,"
        " on-divergence=continue in a config."
    )


def account(reports: Sequence[RoundReport]) -> str:
    """Return how many clients the rounds asked, how many replied, and the most frequent
    reasons of refusals.
    """
    reasons = [
        _NODE.sub("", why) for report in reports for why in report.rejected.values()
    ]
    short = Counter(
        why if len(why) <= _LONGEST else f"...{why[-_LONGEST:]}" for why in reasons
    )
    counts = (
        f"{sum(r.asked for r in reports)} clients asked,"
        f" {sum(r.replied for r in reports)} replied"
    )
    listed = "; ".join(f"{count} x {why}" for why, count in short.most_common(3))
    more = f"; and {len(short) - 3} other reasons" if len(short) > 3 else ""
    return f"{counts}, {len(reasons)} refused or lost" + (
        f": {listed}{more}" if reasons else ""
    )


def nothing_trained(min_replies: int, reports: Sequence[RoundReport]) -> str:
    """Return the message for a run in which no round used a reply."""
    reasons = [why for report in reports for why in report.rejected.values()]
    first = f" First refused: {reasons[0]}." if reasons else ""
    # none: resumed with no rounds left
    counts = f" In all, {account(reports)}." if reports else ""
    return (
        f"nothing was trained: no round had min-replies={min_replies} usable"
        f" replies.{first}{counts}"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} others" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


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
    report.diverged_at = min(
        since or report.server_round, report.diverged_at or report.server_round
    )
    advice = [] if known else run.methods.advice(run.states, report.server_round)
    logger.error(
        "%s",
        " ".join(
            [f"round {report.server_round} diverged: {'; '.join(losses)}.", *advice]
        ),
    )


def note_too_few(run: Run, num_usable: int) -> None:
    """Note and log a round with too few usable replies, and divergence where all
    replies are not finite.
    """
    report = run.report
    report.kept_previous = True
    logger.warning(
        "round %d: %d usable replies, %d needed (min_replies): the previous global"
        " model is kept. %s.",
        report.server_round,
        num_usable,
        run.methods.params.min_replies,
        account([report]),
    )
    since = 0
    if all_not_finite(report):
        since = run.not_finite_since or report.server_round
    run.not_finite_since = since
    if since and (since < report.server_round or run.num_rounds == 1):
        first = _NODE.sub("", next(iter(report.rejected.values())))[-_LONGEST:]
        note_losses(
            run,
            [
                f"since round {since} all replies hold values that are not finite"
                f" (first: {first})"
            ],
            since,
        )


def raise_if_ends(run: Run, result: Result | None = None) -> None:
    """Raise DivergedError, with the result so far, if the run ends because it diverged."""
    if ends_run(run):
        report = run.report
        advice = " ".join(run.methods.advice(run.states, report.server_round))
        raise DivergedError(divergence(report, advice), report.diverged_at, result)


def raise_if_failed(run: Run, result: Result) -> None:
    """Raise DivergedError or NothingTrainedError, with the result, if the finished run
    is one.
    """
    raise_if_ends(run, result)
    if _has_trained_nothing(run):
        raise NothingTrainedError(
            nothing_trained(run.methods.params.min_replies, run.reports), result
        )


def raise_if_nothing_trains(run: Run) -> None:
    """Raise NothingTrainedError in another loop than our ``start``, whose end nobody
    tells us.

    That is in its last round if the number of rounds is known, else in the second one.
    """
    asked = [report for report in run.reports if report.asked]
    if (
        len(run.reports) >= (run.num_rounds or _PATIENCE)
        and len(asked) > 0
        and _has_trained_nothing(run)
    ):
        raise NothingTrainedError(
            nothing_trained(run.methods.params.min_replies, run.reports)
        )


def _has_trained_nothing(run: Run) -> bool:
    # A resumed run may have trained before: its earlier rounds are not known here.
    trains = run.options.fraction_train > 0 and not run.after
    # A run that continues after divergence may have no usable reply for that reason
    # alone.
    diverged = any(report.diverged for report in run.reports)
    return (
        bool(run.reports)
        and trains
        and not diverged
        and all(report.kept_previous for report in run.reports)
    )

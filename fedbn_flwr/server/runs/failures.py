"""Rounds and runs that fail: losses that are not finite, too few usable replies.

What is found out of a run comes first, then what is noted in its report, then what ends
it; the last part puts it into words.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flwr.serverapp.strategy import Result

from fedbn_flwr.errors import (
    FIRST_PASS_NOT_FINITE,
    INPUTS_NOT_FINITE,
    NOT_FINITE,
    STATISTICS_NOT_FINITE,
    TOO_FEW_LEFT,
    DivergedError,
    NothingTrainedError,
)
from fedbn_flwr.messages.protocol import NUM_EXAMPLES
from fedbn_flwr.server.runs.report import RoundReport, listed
from fedbn_flwr.server.runs.run import Run

__all__ = [
    "account",
    "all_not_finite",
    "divergence",
    "losses_not_finite",
    "note_losses",
    "note_too_few",
    "nothing_trained",
    "raise_if_ends",
    "raise_if_failed",
    "raise_if_nothing_trains",
    "shortened",
    "training_losses",
    "with_refusals",
]

logger = logging.getLogger("flwr")

_NODE = re.compile(r"\bnode \d+( \(partition \d+\))?: ")
# Rounds without a usable reply from the start on, where the number of rounds is not
# known.
_PATIENCE = 2
# Causes that a client or the arrays of its reply show, with what helps.
_FOUND = {
    INPUTS_NOT_FINITE: (
        "Cause: NaN or infinity in the clients' inputs. Replace these values, or leave"
        " out the examples, where the data are made."
    ),
    STATISTICS_NOT_FINITE: (
        "Cause: running statistics that are not finite, with finite weights: squares"
        " that half precision does not hold, in a batch whose step the gradient scaler"
        " left out; those of inputs that are not scaled; or a variance without"
        " examples. Use bfloat16, or keep BatchNorm in float32, and scale the inputs."
    ),
    FIRST_PASS_NOT_FINITE: (
        "Cause: before any step the loss or a gradient is not finite, by the model, the"
        " loss or the dtype: the clients' errors say which."
    ),
}
_LONGEST = 300  # characters of a reason; the end of a traceback says most


def losses_not_finite(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the losses that are not finite, in words.

    Args:
        metrics: metrics by the label of the client; "" = the server's. A loss is a
            metric whose name ends in "loss". A test in which no target counts has no
            loss: its accuracy (or acc) is NaN, too, or it has no examples.
    """
    clients_of: dict[str, list[str]] = {}
    for label, values in metrics.items():
        for name in _losses(values):
            loss = values[name]
            finite = not isinstance(loss, float) or math.isfinite(loss)
            if not finite and _was_tested(name.removesuffix("loss"), values):
                clients_of.setdefault(name, []).append(label or str(loss))
    if "" in metrics:
        return [f"{name} is {who[0]}" for name, who in clients_of.items()]
    return [
        f"{name} of client {listed(who)} is not finite"
        for name, who in clients_of.items()
    ]


def _losses(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the losses; "loss" repeats the first of several tests."""
    losses = [name for name in values if name.endswith("loss")]
    return [name for name in losses if name != "loss"] or losses


def _was_tested(prefix: str, values: Mapping[str, Any]) -> bool:
    """Return whether a test had an example that counts."""
    if values.get(f"{prefix}{NUM_EXAMPLES}") == 0:
        return False
    accuracy = values.get(f"{prefix}accuracy", values.get(f"{prefix}acc"))
    return not (isinstance(accuracy, float) and math.isnan(accuracy))


def training_losses(
    metrics: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Return the metrics of the clients' training without losses of something else:
    "loss" and "train...loss" stay.

    Another loss, as of validation data that a client does not have, may be NaN.
    """
    kept: dict[str, dict[str, Any]] = {}
    for label, values in metrics.items():
        kept[label] = {}
        for name, value in values.items():
            if not name.endswith("loss") or re.fullmatch("(train.*)?loss", name):
                kept[label][name] = value
    return kept


def all_not_finite(report: RoundReport) -> bool:
    """Return whether values that are not finite are why no reply was usable."""
    if report.participants or not report.rejected:
        return False
    # A client whose value was not finite may have left too few of the others for a
    # synchronised step: its value is why they were refused.
    causes = {NOT_FINITE, TOO_FEW_LEFT, *_FOUND}
    return all(report.codes.get(node_id, set()) & causes for node_id in report.rejected)


def _advice(run: Run) -> list[str]:
    """Return why values are not finite, and what to do: the cause that the replies show,
    else what the methods say.
    """
    if all_not_finite(run.report):
        codes = set().union(*run.report.codes.values())
        for code, text in _FOUND.items():
            if code in codes:
                return [text]
    return [
        *run.methods.advice(run.states, run.report.server_round),
        "In a training loop of your own look for NaN in the inputs first.",
    ]


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
    # The remedies are told once, and not in each round of a run that goes on.
    known = any(earlier.diverged for earlier in run.reports[-2:])
    report.diverged += [loss for loss in losses if loss not in report.diverged]
    began = since or report.server_round
    report.diverged_at = min(began, report.diverged_at or report.server_round)
    words = [f"round {report.server_round} diverged: {'; '.join(losses)}."]
    if not known:
        words += _advice(run)
    logger.error("%s", " ".join(words))


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
    if not all_not_finite(report):
        run.not_finite_since = 0
        return
    # Once may be chance: other clients, or the next batches, may be well.
    since = run.not_finite_since = run.not_finite_since or report.server_round
    if since < report.server_round or run.num_rounds == 1:
        first = _NODE.sub("", next(iter(report.rejected.values())))[-_LONGEST:]
        loss = (
            f"since round {since} all replies hold values that are not finite (first:"
            f" {first})"
        )
        note_losses(run, [loss], since)


def raise_if_ends(run: Run, result: Result | None = None) -> None:
    """Raise DivergedError, with the result so far, if the run ends because it diverged."""
    if run.ends_diverged:
        report = run.report
        advice = " ".join(_advice(run))
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
    over = len(run.reports) >= (run.num_rounds or _PATIENCE)
    if not over or not any(report.asked or report.rejected for report in run.reports):
        return
    if _has_trained_nothing(run):
        raise NothingTrainedError(
            nothing_trained(run.methods.params.min_replies, run.reports)
        )


def _has_trained_nothing(run: Run) -> bool:
    """Return whether a run that should train used no reply in any of its rounds."""
    # A resumed run may have trained before: its earlier rounds are not known here.
    if run.options.fraction_train == 0 or run.after or not run.reports:
        return False
    # A run that continues after divergence may have no usable reply for that reason
    # alone.
    if any(report.diverged for report in run.reports):
        return False
    return all(report.kept_previous for report in run.reports)


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


def nothing_trained(min_replies: int, reports: Sequence[RoundReport]) -> str:
    """Return the message for a run in which no round used a reply."""
    return (
        f"nothing was trained: no round had min-replies={min_replies} usable"
        f" replies.{_refusals(reports)}"
    )


@contextmanager
def with_refusals(run: Run) -> Iterator[None]:
    """Add the reasons of refused replies, and the result so far, to a
    NothingTrainedError of the block, which begins a round.
    """
    try:
        yield
    except NothingTrainedError as error:
        text = f"{error}{_refusals(run.reports[:-1])}"
        raise NothingTrainedError(text, Result(arrays=run.arrays)) from None


def _refusals(reports: Sequence[RoundReport]) -> str:
    """Return the sentences about refused replies, each after a space."""
    # The first reason in full: later ones often follow from it.
    reasons = [why for report in reports for why in report.rejected.values()]
    first = f" First refused: {reasons[0]}." if reasons else ""
    # none: resumed with no rounds left
    counts = f" In all, {account(reports)}." if reports else ""
    return f"{first}{counts}"


def account(reports: Sequence[RoundReport]) -> str:
    """Return how many clients the rounds asked, how many replied, and the most frequent
    reasons of refusals.
    """
    asked = sum(report.asked for report in reports)
    replied = sum(report.replied for report in reports)
    # Without the node a reason that several clients share counts once.
    reasons: Counter[str] = Counter()
    for report in reports:
        for why in report.rejected.values():
            reasons[shortened(why)] += 1
    text = (
        f"{asked} clients asked, {replied} replied, {reasons.total()} refused or lost"
    )
    if not reasons:
        return text
    listed = "; ".join(f"{count} x {why}" for why, count in reasons.most_common(3))
    more = f"; and {len(reasons) - 3} other reasons" if len(reasons) > 3 else ""
    return f"{text}: {listed}{more}"


def shortened(reason: str) -> str:
    """Return a reason without its node; of a long one the end, as of a traceback."""
    reason = _NODE.sub("", reason)
    return reason if len(reason) <= _LONGEST else f"...{reason[-_LONGEST:]}"

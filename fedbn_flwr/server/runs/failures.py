"""Failing rounds and runs, with non-finite losses or too few usable replies.

The module has four parts: detecting a failure, noting it in the round's report, raising
the error that ends the run, and composing the error message.
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
    FIRST_PASS_NOT_FINITE,
    INPUTS_NOT_FINITE,
    NOT_FINITE,
    STATISTICS_NOT_FINITE,
    TOO_FEW_LEFT,
    DivergedError,
    NothingTrainedError,
)
from fedbn_flwr.messages.protocol import NUM_EXAMPLES
from fedbn_flwr.messages.site_names import with_name
from fedbn_flwr.server.runs.round_report import RoundReport, first_five
from fedbn_flwr.server.runs.run_state import Run

logger = logging.getLogger("flwr")

# If the total number of rounds is unknown, give up after this many rounds, counted from
# the start, if none of them had a usable reply.
_PATIENCE = 2
# Causes that a client reports, or that the arrays of its reply reveal, with the remedy.
_FOUND = {
    INPUTS_NOT_FINITE: (
        "Cause: the clients' inputs contain NaN or infinity. Replace these values or"
        " drop the examples when preparing the data."
    ),
    STATISTICS_NOT_FINITE: (
        "Cause: the weights are finite, but the running statistics are not. Possible"
        " reasons: squares that overflowed in half precision, in a batch whose step the"
        " gradient scaler skipped; squares of unscaled inputs; or a variance of no"
        " examples. Use autocast in bfloat16 (amp=true) or keep BatchNorm in float32,"
        " and scale the inputs."
    ),
    FIRST_PASS_NOT_FINITE: (
        "Cause: the loss or a gradient is not finite before the first step, because of"
        " the model, the loss function or the dtype. The clients' errors name the"
        " cause."
    ),
}
# last characters of a reason that are kept: a traceback ends with the error
_LONGEST = 300


def losses_not_finite(
    metrics: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, str] | None = None,
    *,
    of_training: bool = False,
) -> list[str]:
    """Return a description of each loss that most clients have non-finite.

    The loss of a few clients is theirs, and the mean leaves it out.

    Args:
        metrics: the metrics of each client by its label; the label "" is the server. A
            loss is a metric whose name ends in "loss". Tests without a counted target
            are skipped: their accuracy (or acc) is NaN as well, or they have no
            examples.
        names: the names of the sites, by label.
        of_training: only losses of the training, "loss" and "train...loss". Others may
            be NaN, such as the validation loss of a client without validation data.
    """
    names = names or {}
    clients_of: dict[str, list[str]] = {}
    for label, values in metrics.items():
        # Omit "loss" if there are others, since it repeats the first of them.
        kind = "(train.*)?loss" if of_training else ".*loss"
        losses = [name for name in values if re.fullmatch(kind, name, re.DOTALL)]
        for name in [name for name in losses if name != "loss"] or losses:
            loss = values[name]
            finite = not isinstance(loss, float) or math.isfinite(loss)
            if not finite and _was_tested(name.removesuffix("loss"), values):
                who = with_name(label, names.get(label)) or str(loss)
                clients_of.setdefault(name, []).append(who)
    if "" in metrics:
        return [f"{name} is {who[0]}" for name, who in clients_of.items()]
    return [
        f"{name} of client {first_five(who)} is not finite"
        for name, who in clients_of.items()
        if 2 * len(who) > len(metrics)
    ]


def _was_tested(prefix: str, values: Mapping[str, Any]) -> bool:
    """Return whether the test had at least one counted example."""
    if values.get(f"{prefix}{NUM_EXAMPLES}") == 0:
        return False
    accuracy = values.get(f"{prefix}accuracy", values.get(f"{prefix}acc"))
    return not (isinstance(accuracy, float) and math.isnan(accuracy))


def all_not_finite(report: RoundReport) -> bool:
    """Return whether non-finite values made every reply of the round unusable."""
    if report.participants or not report.rejected:
        return False
    # Dropping a client with a non-finite value may leave too few clients for a
    # synchronised step. Their refusals (TOO_FEW_LEFT) then have the same cause.
    causes = {NOT_FINITE, TOO_FEW_LEFT, *_FOUND}
    return all(report.codes.get(node_id, set()) & causes for node_id in report.rejected)


def _advice(run: Run) -> list[str]:
    """Return the cause of the non-finite values and the remedies.

    The cause comes from the replies if they reveal one, otherwise from the methods.
    """
    if run.start.far_model:
        return [
            f"Cause: the model of one node was far from the others. {run.start.far_model}."
            " Start again without this node, or after its repair."
        ]
    if all_not_finite(run.report):
        codes = set().union(*run.report.codes.values())
        # The weights of one reply are not finite, so large steps are the cause.
        if NOT_FINITE in codes:
            codes.discard(STATISTICS_NOT_FINITE)
        for code, text in _FOUND.items():
            if code in codes:
                return [text]
    return [
        *run.methods.advice(run.states, run.report.server_round, run.start.split),
        "If you use your own training loop, check the inputs for NaN first.",
    ]


def note_losses(run: Run, losses: Sequence[str], since: int | None = None) -> None:
    """Log the non-finite losses of this round and add them to its report.

    Args:
        run: the run.
        losses: descriptions from ``losses_not_finite``; empty if all are finite.
        since: the first round of the divergence; defaults to this round.
    """
    if not losses:
        return
    report = run.report
    # Log the remedies once, not in every round of a run that continues.
    is_told = any(earlier.diverged for earlier in run.reports[-2:])
    report.diverged += [loss for loss in losses if loss not in report.diverged]
    began = since or report.server_round
    report.diverged_at = min(began, report.diverged_at or report.server_round)
    words = [f"round {report.server_round} diverged: {'; '.join(losses)}."]
    if not is_told:
        words += _advice(run)
    logger.error("%s", " ".join(words))


def note_losses_of_clients(run: Run, field: str) -> None:
    """Note the non-finite losses of this round's clients.

    If only one of several clients has metrics, those of the round before decide too.

    Args:
        run: the run.
        field: "clients" for the training, or "evaluations".
    """
    metrics: Mapping[str, Mapping[str, float]] = getattr(run.report, field)
    if metrics and not run.may_end_by(len(metrics)):
        metrics = {**getattr(run.reports[-2:][0], field), **metrics}
    if run.may_end_by(len(metrics)):
        of_training = field == "clients"
        losses = losses_not_finite(metrics, run.nodes.names, of_training=of_training)
        note_losses(run, losses)


def note_too_few(run: Run, num_usable: int) -> None:
    """Record and log a round with too few usable replies.

    If non-finite values are the reason for the second round in a row, or in the only
    round of the run, also record the divergence.
    """
    report = run.report
    report.kept_previous = True
    logger.warning(
        "round %d: %d usable replies, fewer than min_replies=%d: keeping the previous"
        " global model. %s.",
        report.server_round,
        num_usable,
        run.methods.params.min_replies,
        account([report]),
    )
    if not all_not_finite(report):
        run.not_finite_since = 0
        return
    # A single such round is not a divergence, because the clients or batches of the
    # next round may be fine.
    since = run.not_finite_since = run.not_finite_since or report.server_round
    series = [one for one in run.reports if one.server_round >= since]
    senders = set[int]().union(*(one.rejected for one in series))
    if not run.may_end_by(len(senders)):
        return
    if since < report.server_round or run.start.num_rounds == 1:
        first = next(iter(report.reasons.values()))[-_LONGEST:]
        loss = (
            f"every reply since round {since} has values that are not finite or too"
            f" large (first: {first})"
        )
        note_losses(run, [loss], since)


def raise_if_ends(run: Run, result: Result | None = None) -> None:
    """Raise DivergedError with the result so far if divergence ends the run."""
    if run.ends_diverged:
        report = run.report
        advice = " ".join(_advice(run))
        raise DivergedError(divergence(report, advice), report.diverged_at, result)


def raise_if_nothing_trains(run: Run) -> None:
    """Raise NothingTrainedError if no round used a reply, in loops except ``start``.

    Such loops do not report when they end, so the check runs after the last round if
    the number of rounds is known, and after the second round otherwise.
    """
    over = len(run.reports) >= (run.start.num_rounds or _PATIENCE)
    if over and any(report.asked or report.rejected for report in run.reports):
        raise_if_untrained(run)


def raise_if_untrained(run: Run, result: Result | None = None) -> None:
    """Raise NothingTrainedError if a run that was meant to train used no reply."""
    # A resumed run may have trained before the resume; those reports are not available.
    if run.flower_args.fraction_train == 0 or run.start.after or not run.reports:
        return
    # A run that continues after a divergence may lack usable replies only because it
    # diverged.
    if any(report.diverged for report in run.reports):
        return
    if all(report.kept_previous for report in run.reports):
        raise NothingTrainedError(
            nothing_trained(run.methods.params.min_replies, run.reports), result
        )


def warn_of_unused_end(run: Run) -> None:
    """Warn if the last rounds were not used, so that the model is an earlier one."""
    used = [one.server_round for one in run.reports if not one.kept_previous]
    lost = [one for one in run.reports if one.server_round > max(used, default=0)]
    if lost:
        logger.warning(
            "no round after round %d was used: the result is the model of that round.%s",
            lost[0].server_round - 1,
            _refusals(lost),
        )


def divergence(report: RoundReport, advice: str) -> str:
    """Return the error message of a diverged run.

    ``report`` is the report of its last round; ``advice`` has cause and remedies.
    """
    losses = "; ".join(report.diverged)
    return (
        f"the run diverged in round {report.diverged_at}: {losses}. {advice} To"
        " continue despite divergence, pass on_divergence='continue' to the strategy,"
        " or set on-divergence=continue in the config."
    )


def nothing_trained(min_replies: int, reports: Sequence[RoundReport]) -> str:
    """Return the error message of a run that used no reply."""
    return (
        "nothing was trained: no round had the required"
        f" min-replies={min_replies} usable replies.{_refusals(reports)}"
    )


def with_refusals(run: Run, error: NothingTrainedError) -> NothingTrainedError:
    """Return an error of a round's start, with the refusals and the result so far."""
    text = f"{error}{_refusals(run.reports[:-1])}"
    return NothingTrainedError(text, Result(arrays=run.arrays))


def _refusals(reports: Sequence[RoundReport]) -> str:
    """Return the sentences about refused replies, each with a space before it."""
    # Quote the first reason in full: the later refusals often follow from it.
    reasons = [why for report in reports for why in report.rejected.values()]
    first = f" First refused: {reasons[0]}." if reasons else ""
    # The reports are empty if a run is resumed with no rounds left.
    counts = f" In all, {account(reports)}." if reports else ""
    return f"{first}{counts}"


def account(reports: Sequence[RoundReport]) -> str:
    """Return a summary of the rounds for messages.

    The summary has the numbers of asked clients and of replies, and the most frequent
    reasons for refusal.
    """
    asked = sum(report.asked for report in reports)
    replied = sum(report.replied for report in reports)
    reasons: Counter[str] = Counter()
    for report in reports:
        for why in report.reasons.values():
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
    """Return a reason, or only its end if it is long."""
    return reason if len(reason) <= _LONGEST else f"...{reason[-_LONGEST:]}"

"""Failures in words: error replies, losses that are not finite, and rounds without enough usable replies."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Message

from fedbn_flwr.compat.flower import is_mod_refusal
from fedbn_flwr.errors import NOT_FINITE, TOO_FEW_LEFT
from fedbn_flwr.messages.protocol import NUM_EXAMPLES
from fedbn_flwr.server.report import RoundReport

__all__ = ["MOD_ORDER", "TOO_LARGE_STEPS", "account", "all_not_finite", "divergence", "error_text"]
__all__ += ["losses_not_finite", "nothing_trained", "training_losses"]

MOD_ORDER = (
    "A mod of the app refuses messages that it was not made for. Put local_bn first, ClientApp(mods=[local_bn]), and "
    "give mods that act on training to the training function alone, @app.train(mods=[...]) or client_app(..., "
    "train_mods=[...])"
)
TOO_LARGE_STEPS = (
    "Likely cause: the training steps are too large for the model. What helped in small runs: a lower learning-rate, a "
    "tenth or less; for a deep model without normalisation also norm=batch."
)
_NODE = re.compile(r"\bnode \d+( \(partition \d+\))?: ")
_LONGEST = 300  # characters of a reason; the end of a traceback says most


def error_text(reply: Message) -> str:
    """Return the error of an error reply, with advice where its cause is known."""
    reason = str(reply.error.reason)
    advice = ""
    if is_mod_refusal(reply):
        advice = f"{'' if reason.endswith('.') else '.'} {MOD_ORDER}."
    elif "fitins.parameters" in reason:
        advice = ". This ClientApp is built from a NumPyClient: make it with fedbn_flwr.client_app(client_fn)"
    return f"error {reply.error.code}: {reason}{advice}"


def all_not_finite(report: RoundReport) -> bool:
    """Return whether training gave only values that are not finite, and for this reason no reply was usable."""
    # If too few clients are left for a synchronised step, the others' values are why.
    codes = [report.codes.get(node_id, set()) & {NOT_FINITE, TOO_FEW_LEFT} for node_id in report.rejected]
    return not report.participants and bool(codes) and all(codes)


def losses_not_finite(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the losses that are not finite, in words.

    Args:
        metrics: metrics by the label of the client; "" = the server's. A loss is a metric whose name ends in "loss". A
            test in which no target counts has no loss: its accuracy (or acc) is NaN, too, or it has no examples.
    """
    clients_of: dict[str, list[str]] = {}
    for label, values in metrics.items():
        losses = [name for name in values if name.endswith("loss")]
        for name in [name for name in losses if name != "loss"] or losses:  # "loss" repeats the first of several tests
            loss, prefix = values[name], name.removesuffix("loss")
            accuracy = values.get(f"{prefix}accuracy", values.get(f"{prefix}acc", 0.0))
            tested = not isinstance(accuracy, float) or not math.isnan(accuracy)
            tested = tested and values.get(f"{prefix}{NUM_EXAMPLES}") != 0
            if tested and isinstance(loss, float) and not math.isfinite(loss):
                clients_of.setdefault(name, []).append(label or str(loss))
    return [
        f"{name} is {who[0]}" if "" in metrics else f"{name} of client {_listed(who)} is not finite"
        for name, who in clients_of.items()
    ]


def training_losses(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the metrics of the clients' training without losses of something else: "loss" and "train...loss" stay.

    Another loss, as of validation data that a client does not have, may be NaN.
    """

    def stays(name: str) -> bool:
        return not name.endswith("loss") or re.fullmatch("(train.*)?loss", name) is not None

    return {label: {name: value for name, value in values.items() if stays(name)} for label, values in metrics.items()}


def divergence(report: RoundReport, advice: str) -> str:
    """Return the message for a run that diverged, given the report of its last round, and cause and remedies."""
    losses = "; ".join(report.diverged)
    return (
        f"the run diverged in round {report.diverged_at}: {losses}. {advice} With on-divergence=continue a run goes on."
    )


def account(reports: Sequence[RoundReport]) -> str:
    """Return how many clients the rounds asked, how many replied, and the most frequent reasons of refusals."""
    reasons = [_NODE.sub("", why) for report in reports for why in report.rejected.values()]
    short = Counter(why if len(why) <= _LONGEST else f"...{why[-_LONGEST:]}" for why in reasons)
    counts = f"{sum(r.asked for r in reports)} clients asked, {sum(r.replied for r in reports)} replied"
    listed = "; ".join(f"{count} x {why}" for why, count in short.most_common(3))
    more = f"; and {len(short) - 3} other reasons" if len(short) > 3 else ""
    return f"{counts}, {len(reasons)} refused or lost" + (f": {listed}{more}" if reasons else "")


def nothing_trained(min_replies: int, reports: Sequence[RoundReport]) -> str:
    """Return the message for a run in which no round used a reply."""
    reasons = [why for report in reports for why in report.rejected.values()]
    first = f" First refused: {reasons[0]}." if reasons else ""
    counts = f" In all, {account(reports)}." if reports else ""  # none: resumed with no rounds left
    return f"nothing was trained: no round had min-replies={min_replies} usable replies.{first}{counts}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} others" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more

"""The interface for privacy between the clients' replies and the methods.

A protection replaces the replies of a round by one average with noise. The class here
does nothing. The module also names the values that clients send in addition to their
update, and decides which of Flower's wrappers work around a strategy of this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.method import Facts, Method, Reply, reads_undeclared
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.runs.round_report import RoundReport


class Protection:
    """No protection, and the base class of all protections.

    Attributes:
        publishes_metrics: whether the clients' metrics are added to the run's reports.
        always_releases: whether a round has a result even if too few replies, or none,
            are usable. Clients then never send a hash of their local state, because a
            hash would confirm a guess of the client's data.
    """

    publishes_metrics = True
    always_releases = False

    def begin(self, methods: Methods) -> None:
        """Prepare a new run.

        Raises:
            ConfigError: the methods, or one of their settings, do not fit.
        """

    def config(self) -> Mapping[str, Any]:
        """Return further config entries of a training message."""
        return {}

    def check(self, facts: Facts, reply: Reply) -> None:
        """Raise ReplyError for a reply that breaks a rule of the protection."""

    def pool(
        self,
        facts: Facts,
        report: RoundReport,
        replies: Sequence[Reply],
    ) -> Sequence[Reply]:
        """Return the replies that the method combines, at least one.

        Args:
            facts: the round.
            report: its report.
            replies: the usable replies, in the order of partition ids.
        """
        return replies

    def outcome(self) -> dict[str, Any]:
        """Return the protection's entries of a run's summary, by key."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of ``state_dict``."""


# --- what clients send in addition to their update ------------------------------------
#
# It follows from the declarations of the methods.


class Disclosure(NamedTuple):
    """A value that clients send in addition to their update.

    Attributes:
        text: the value, and the reason why it reveals something about a client.
        key: its key in the reply; empty if it is not a record or a metric.
        instead: the alternative. It is empty only before ``disclosures`` adds the
            alternative of the method.
    """

    text: str
    key: str = ""
    instead: str = ""


def disclosures(methods: Methods) -> list[Disclosure]:
    """Return the additional values that clients send or that the server reads."""
    sent: list[Disclosure] = []
    for method in methods:
        for one in _sent_for(method):
            sent.append(one._replace(instead=one.instead or method.instead))
    # Two methods may send the same value: list it once.
    return list(dict.fromkeys(sent))


def uncovered(methods: Methods, key: str, value: str) -> Iterator[Problem]:
    """Yield a problem for each value of clients that a protection does not cover.

    ``key`` and ``value`` are the setting that asks for the protection.
    """
    for disclosure in disclosures(methods):
        text = f"strategy {methods.name!r} with {key}={value}: {disclosure.text}"
        if disclosure.key:
            text += f" ({disclosure.key!r} in the reply)"
        yield Problem("unprotected-value", text, key, remedy=disclosure.instead)


def _sent_for(method: Method[Any, Any]) -> Iterator[Disclosure]:
    """Yield the values that clients send because of one method."""
    phase = method.all_phases
    if Part.REST in phase.local:
        yield Disclosure("its clients share nothing, so there is nothing to protect")

    # List the records and metrics. A metric that is only logged is left out, because it
    # may be withheld.
    says_why = False
    for extra in phase.extras:
        if extra.size != "scalar" or extra.read != "log":
            says_why = True
            yield Disclosure(extra.why, key=extra.key, instead=extra.instead)
    if phase.weights not in ("examples", "equal") and not says_why:
        yield Disclosure(f"the clients' {phase.weights} are the weights of the average")

    # List the values sent between the messages of a round, and before tests.
    if phase.exchanges:
        yield Disclosure(
            "the exchanges of its first step contain statistics of clients' single"
            " batches"
        )
    if phase.reestimates:
        yield Disclosure(
            f"{method.title} collects statistics that are re-estimated on the clients'"
            " data"
        )

    if phase.class_moments:
        yield Disclosure(
            f"{method.title} collects the moments of each client's BN inputs for each"
            " class"
        )

    # List reads of single replies, unless a record has already revealed as much.
    if reads_undeclared(type(method)):
        kind = type(method).__name__
        yield Disclosure(
            f"{kind}.aggregate may read anything in single replies",
            instead=f"{kind}.phases to declare which parts it reads",
        )
    elif phase.each and not says_why:
        yield Disclosure(
            f"{method.title} reads the {', '.join(sorted(phase.each))} of single"
            " replies"
        )


_INSTEAD = (
    "fedbn_flwr.privacy.DPWrapper, which weighs all clients equally and handles each"
    " part of the model"
)


def of_wrapper(wrapper: str, methods: Methods, parts: Parts) -> Iterator[Problem]:
    """Yield a problem for each fault of Flower's wrapper around the strategy.

    Values of the clients may bypass the wrapper, or the wrapper may break the methods.
    The wrapper also expects equal weights, and treats counters like model weights.
    ``wrapper`` is the name of its class.
    """
    reasons = [disclosure.text for disclosure in disclosures(methods)]
    if methods.local and "ServerSide" in wrapper:
        reasons.append(
            "it needs the whole model in each reply, but the clients keep a part of it"
        )
    if methods.freezes_bn:
        reasons.append("it would add noise to frozen statistics")
    if parts.fixed:
        reasons.append(
            "it needs the whole model in each reply and would add noise to all of it,"
            " but train_only sends only the entries that train"
        )
    if reasons:
        text = f"{wrapper} around strategy {methods.name!r}: {'; '.join(reasons)}"
        yield Problem("around-a-strategy", text, "strategy", "start", remedy=_INSTEAD)
    yield Problem(
        "unequal-weights",
        f"{wrapper} expects all clients to have the same weight, but strategy"
        f" {methods.name!r} weighs the clients by |D_i|. One client can therefore move"
        " the average further than the noise covers, and an epsilon computed only from"
        " the noise multiplier would be too small",
        "strategy",
        "start",
        "warn",
        _INSTEAD,
    )
    if parts.counters:
        yield Problem(
            "counters-as-weights",
            f"{wrapper} clips BN's int64 counters and running statistics, and adds noise"
            " to them, as if they were weights: the counters can use up the"
            " clipping norm, and variances can become negative",
            "strategy",
            "start",
            "warn",
            _INSTEAD,
        )

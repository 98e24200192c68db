"""The declarations of methods, as data that describe each phase.

Code here and in its readers derives all else from them: the entries that stay with the
clients, the model that a method needs, the shape checks of
replies, the refusals of privacy, the records under masked sums, whether sums are
enough, and which methods exclude each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.transport.step_transport import LinkSettings
from fedbn_flwr.transport.transports import TRANSPORTS

__all__ = [
    "ALL",
    "BATCHNORM",
    "NONE",
    "PERSONAL",
    "TRACKED",
    "Exchanges",
    "Extra",
    "PartSet",
    "Travels",
]

PartSet = frozenset[Part]
NONE: PartSet = frozenset()
TRACKED: PartSet = frozenset({Part.STATISTICS, Part.COUNTERS})
BATCHNORM: PartSet = TRACKED | {Part.AFFINE}
PERSONAL: PartSet = frozenset({Part.PERSONAL})
ALL: PartSet = BATCHNORM | {Part.REST} | PERSONAL


@dataclass(frozen=True)
class Extra:
    """A record or a metric that a client sends in addition to the model.

    Attributes:
        key: the name in the reply, and in the training message if it is a record.
        size: "trainable" for arrays like the shared trainable entries; "local" for a copy of the client's local entries; "scalar" for a metric.
        why: what it reveals about a client; used when privacy refuses the method.
        down: whether the server sends it as well, from round 2 on.
        read: "mean" if the average with the weights p_i is enough, "each" if the server
            uses single values, "log" if it is only reported.
        required: whether a reply without it is refused.
        instead: the alternative in this refusal; by default the alternative of the
            method.
    """

    key: str
    size: Literal["trainable", "local", "scalar"]
    why: str
    down: bool = False
    read: Literal["mean", "each", "log"] = "each"
    required: bool = False
    instead: str = ""


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of statistics in the first local step.

    Attributes:
        forward: the number of exchanges, and of rows of channels in each direction, for
            one call of a BN layer.
        backward: the same numbers for the backward pass, which are added if the input
            of the layer needs a gradient.
        read: "mean" if the server needs only weighted sums (3L+1), "each" if it needs
            more (2L+1).
        link: the transport of the exchanges and its settings.
        apart: further numbers in each direction for one call of a BN layer.
    """

    forward: tuple[int, int]
    backward: tuple[int, int] = (0, 0)
    read: Literal["mean", "each"] = "mean"
    link: LinkSettings = field(default_factory=LinkSettings)
    apart: int = 0

    def cost(self, gradient: bool = True) -> tuple[int, int]:
        """Return the exchanges of one BN call, and its rows of channels each way.

        ``gradient``: whether the input of the layer needs a gradient.
        """
        if not gradient:
            return self.forward
        return self.forward[0] + self.backward[0], self.forward[1] + self.backward[1]


@dataclass(frozen=True)
class Travels:
    """The declaration of a phase of a method. The model travels without ``local``.

    Attributes:
        phase: the name of the phase; empty if the method has only one phase.
        last: the last round of the phase. In the last phase, None means the end of the
            run. In an earlier phase, None means that the run determines the round.
        local: the parts that stay with the client.
        frozen: the parts that return unchanged; a reply that changed them is refused.
        each: the parts that the server reads in single replies, not only in their
            average.
        weights: "examples" for |D_i|, "equal", or the key of a metric.
        extras: the records and metrics in addition to the model.
        exchanges: the exchanges of the first local step; None if there are none.
        reestimates: whether BN statistics are re-estimated before tests.
        class_moments: whether clients send class moments after the last round.
        undo: whether a client whose reply is not used returns to its earlier local
            state, because the server's state mirrors it.
        decides: decisions that only one method of a run may make: "gradients",
            "server step".
        needs: further parts of BN that the model must have, a set for each need.
        kept: a text that names the state that clients keep in addition to entries of
            the model, e.g. "SGD's momentum".
        second_model: whether a client has a personal model in addition to the global
            model.
        after: the round after which the phase begins at the earliest; None if it is
            unknown, or if the run begins with the phase.
        after_setting: the setting that determines ``after``.
    """

    phase: str = ""
    last: int | None = None
    local: PartSet = NONE
    frozen: PartSet = NONE
    each: PartSet = NONE
    weights: str = "examples"
    extras: tuple[Extra, ...] = ()
    exchanges: Exchanges | None = None
    reestimates: bool = False
    class_moments: bool = False
    undo: bool = False
    decides: frozenset[str] = frozenset()
    needs: tuple[PartSet, ...] = ()
    kept: str = ""
    second_model: bool = False
    after: int | None = None
    after_setting: str = ""

    @property
    def extra_copies(self) -> tuple[int, int]:
        """Numbers of additional copies of the shared trainable floats, down and up.

        The server sends none in round 1.
        """
        records = [extra for extra in self.extras if extra.size == "trainable"]
        return sum(record.down for record in records), len(records)

    @property
    def records(self) -> tuple[Extra, ...]:
        """The records of arrays in addition to the model, without the metrics."""
        return tuple(extra for extra in self.extras if extra.size != "scalar")

    @property
    def needs_all_at_once(self) -> bool:
        """Whether a round's clients must run together, each in its own process."""
        if self.exchanges is None:
            return False
        return TRANSPORTS[self.exchanges.link.transport].all_at_once


def together(declarations: Iterable[Travels]) -> Travels:
    """Return one declaration that merges all given declarations."""
    total = Travels()
    for one in declarations:
        # If only one method may decide, keep the later or the first value:
        # ``combined`` refuses two methods with different values.
        total = Travels(
            local=total.local | one.local,
            frozen=total.frozen | one.frozen,
            each=total.each | one.each,
            weights=one.weights if total.weights == "examples" else total.weights,
            extras=total.extras
            + tuple(extra for extra in one.extras if extra not in total.extras),
            exchanges=one.exchanges or total.exchanges,
            reestimates=total.reestimates or one.reestimates,
            class_moments=total.class_moments or one.class_moments,
            undo=total.undo or one.undo,
            decides=total.decides | one.decides,
            needs=total.needs
            + tuple(parts for parts in one.needs if parts not in total.needs),
            second_model=total.second_model or one.second_model,
            kept="; ".join(dict.fromkeys(filter(None, (total.kept, one.kept)))),
        )
    return total


def in_parallel(methods: Iterable[Sequence[Travels]]) -> list[Travels]:
    """Return the phases of a run, given the phases of each of its methods.

    Raises:
        ConfigError: two methods change their phase in a round that only the run
            determines.
    """
    phases = [Travels()]
    for other in methods:
        phases = list(_merged_phases(phases, other))
    return phases


def _merged_phases(
    first: Sequence[Travels], second: Sequence[Travels]
) -> Iterator[Travels]:
    """Yield the phases of two lists. Each lasts until a phase of either list ends.

    Raises:
        ConfigError: both lists change their phase in a round that only the run
            determines.
    """
    left, right = list(first), list(second)
    while left and right:
        a, b = left[0], right[0]
        # The last phase of a list has no end: it continues to the end of the run.
        ends = [phases[0].last for phases in (left, right) if len(phases) > 1]
        known = [end for end in ends if end is not None]
        if len(ends) == 2 and len(known) < 2:
            raise ConfigError(
                f"phases {a.phase!r} and {b.phase!r} both end in a round that only the"
                " run determines"
            )
        last = min(known, default=None)
        yield dataclasses.replace(together([a, b]), phase=b.phase or a.phase, last=last)
        if not ends:
            return
        # If two phases end in the same round, both lists advance.
        for phases in (left, right):
            if len(phases) > 1 and phases[0].last == last:
                phases.pop(0)


def single_decisions(travels: Travels) -> frozenset[str]:
    """Return the decisions, in words, that only one method of a run may make."""
    decides = set(travels.decides)
    # Leave out personal entries, because they are the user's choice under every method.
    if travels.local - PERSONAL:
        decides.add("which parts stay with the clients")
    if travels.frozen & TRACKED or travels.exchanges:
        decides.add("the statistics that BN normalises with")
    if travels.exchanges:
        decides.add("gradients")
    return frozenset(decides)


def in_common(travels: Travels) -> PartSet:
    """Return the parts that all clients must have in common for the method."""
    common = NONE
    if travels.frozen & TRACKED:
        common |= TRACKED
    if travels.exchanges:
        common |= BATCHNORM
    # Re-estimated statistics need all weights in common, because they are measured with
    # the global weights.
    if travels.reestimates:
        common |= ALL
    return common


def acts_on_batchnorm(travels: Travels) -> bool:
    """Return whether the method treats BN differently from the other entries."""
    apart = (travels.local | travels.frozen) & BATCHNORM
    if apart and Part.REST not in travels.local:
        return True
    return travels.reestimates or travels.exchanges is not None


def model_needs(travels: Travels) -> list[PartSet]:
    """Return the parts of BN that the method needs, as a set for each need.

    The empty set stands for any BN.
    """
    measured = travels.reestimates or travels.class_moments
    needs: list[PartSet] = []
    # A client that keeps the whole model needs no particular layer.
    own = travels.local - PERSONAL
    if own and Part.REST not in own:
        needs.append(own)
    if travels.frozen or travels.exchanges or measured:
        needs.append(NONE)
    if travels.frozen & TRACKED or measured:
        needs.append(frozenset({Part.STATISTICS}))
    if Part.AFFINE in travels.frozen:
        needs.append(frozenset({Part.AFFINE}))
    return list(dict.fromkeys([*needs, *travels.needs]))


def sums_suffice(travels: Travels) -> bool:
    """Return whether the server needs only the average, weighted by |D_i|."""
    if travels.each or travels.exchanges:
        return False
    if any(extra.read == "each" for extra in travels.extras):
        return False
    return travels.weights == "examples"

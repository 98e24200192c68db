"""The declarations of methods, as data that describe each phase.

Code here and in its readers derives all else from them: the entries that stay with the
clients, the model that a method needs, the shape checks of replies, the refusals of
privacy, and the pairs of methods that exclude each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.transport.step_transport import LinkSettings

__all__ = [
    "ALL",
    "BATCHNORM",
    "NONE",
    "PERSONAL",
    "TRACKED",
    "Extra",
    "PartSet",
    "Phase",
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
        size: "trainable" for arrays like the shared trainable entries; "local" for a
            copy of the client's local entries; "scalar" for a metric.
        why: the fact about a client that it reveals; used when privacy refuses the
            method.
        read: "mean" if the average with the weights p_i is enough, "each" if the server
            uses single values, "log" if it is only reported.
        required: whether a reply without it is refused.
        instead: the alternative in this refusal; by default the alternative of the
            method.
    """

    key: str
    size: Literal["trainable", "local", "scalar"]
    why: str
    read: Literal["mean", "each", "log"] = "each"
    required: bool = False
    instead: str = ""


@dataclass(frozen=True)
class Phase:
    """The declaration of a phase of a method.

    The model is sent without ``local``.

    Attributes:
        name: its name; empty if the method has only one phase.
        local: the parts that stay with the client.
        frozen: the parts that return unchanged; a reply that changed them is refused.
        each: the parts that the server reads in single replies, not only in their
            average.
        weights: "examples" for |D_i|, "equal", or the key of a metric.
        extras: the records and metrics in addition to the model.
        exchanges: the transport of the exchanges in the first local step, and its
            settings; None without exchanges.
        reestimates: the weights with which BN statistics are re-estimated before tests:
            "global", or "tested" for the weights of each tested model; "" for none.
        class_moments: whether clients send class moments after the last round.
        undo: whether a client whose reply arrives but is not used returns to its
            earlier local state, because the server's state mirrors it. A client whose
            reply is lost always returns to it.
        decides: decisions that only one method of a run may make: "gradients",
            "server step".
        needs: further parts of BN that the model must have, a set for each need.
        measures: whether clients return measured statistics of the method's layers; the
            counter of a layer is then the number of its values.
        keeps: a text that names the state that clients keep in addition to entries of
            the model, e.g. "SGD's momentum".
        second_model: whether a client has a personal model in addition to the global
            model.
        after: the setting with the round after which the phase begins at the earliest;
            a share of the rounds as in ``round_of``. Empty if no setting has it, or if
            the run begins with the phase.
    """

    name: str = ""
    local: PartSet = NONE
    frozen: PartSet = NONE
    each: PartSet = NONE
    weights: str = "examples"
    extras: tuple[Extra, ...] = ()
    exchanges: LinkSettings | None = None
    reestimates: Literal["", "global", "tested"] = ""
    class_moments: bool = False
    undo: bool = False
    decides: frozenset[str] = frozenset()
    needs: tuple[PartSet, ...] = ()
    measures: bool = False
    keeps: str = ""
    second_model: bool = False
    after: str = ""

    @property
    def records(self) -> tuple[Extra, ...]:
        """The records of arrays in addition to the model, without the metrics."""
        return tuple(extra for extra in self.extras if extra.size != "scalar")


def together(declarations: Iterable[Phase]) -> Phase:
    """Return one declaration that merges all given declarations."""
    total = Phase()
    for one in declarations:
        # If only one method may decide, keep the later or the first value:
        # ``combined`` refuses two methods with different values.
        total = Phase(
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
            measures=total.measures or one.measures,
            second_model=total.second_model or one.second_model,
            keeps="; ".join(dict.fromkeys(filter(None, (total.keeps, one.keeps)))),
        )
    return total


def single_decisions(phase: Phase) -> frozenset[str]:
    """Return the decisions, in words, that only one method of a run may make."""
    decides = set(phase.decides)
    # Leave out personal entries, because they are the user's choice under every method.
    if phase.local - PERSONAL:
        decides.add("which parts stay with the clients")
    if phase.frozen & TRACKED or phase.exchanges:
        decides.add("the statistics that BN normalises with")
    if phase.exchanges:
        decides.add("gradients")
    return frozenset(decides)


def in_common(phase: Phase) -> PartSet:
    """Return the parts that all clients must have in common for the method."""
    common = NONE
    if phase.frozen & TRACKED or phase.measures:
        common |= TRACKED
    if phase.exchanges:
        common |= BATCHNORM
    # These statistics are measured with the global weights, so all weights are common.
    if phase.reestimates == "global":
        common |= ALL
    return common


def acts_on_batchnorm(phase: Phase) -> bool:
    """Return whether the method treats BN differently from the other entries."""
    # A method that keeps the whole model treats BN like the other entries.
    apart = (phase.local | phase.frozen) & BATCHNORM
    if apart and Part.REST not in phase.local:
        return True
    return bool(phase.reestimates or phase.exchanges or phase.needs)


def model_needs(phase: Phase) -> list[PartSet]:
    """Return the parts of BN that the method needs, as a set for each need.

    The empty set stands for any BN.
    """
    measured = bool(phase.reestimates) or phase.class_moments
    needs: list[PartSet] = []
    # A client that keeps the whole model needs no particular layer.
    own = phase.local - PERSONAL
    if own and Part.REST not in own:
        needs.append(own)
    if phase.frozen or phase.exchanges or measured:
        needs.append(NONE)
    if phase.frozen & TRACKED or measured:
        needs.append(frozenset({Part.STATISTICS}))
    if Part.AFFINE in phase.frozen:
        needs.append(frozenset({Part.AFFINE}))
    return list(dict.fromkeys([*needs, *phase.needs]))


def sums_suffice(phase: Phase) -> bool:
    """Return whether the server needs only the average, weighted by |D_i|."""
    if phase.each or phase.exchanges:
        return False
    if any(extra.read == "each" for extra in phase.extras):
        return False
    return phase.weights == "examples"

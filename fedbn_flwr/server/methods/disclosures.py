"""What clients send besides the update of the shared entries, from the declarations of
the methods: for privacy.

Flower's own wrappers for differential privacy around a strategy of this package: which
work, which are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.compat.flower import calling_dp_wrapper
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.together import Methods, declared, reads_unsaid
from fedbn_flwr.server.methods.travels import Exchanges, together

__all__ = ["Disclosure", "check_wrapper", "disclosures"]

logger = logging.getLogger("flwr")


class Disclosure(NamedTuple):
    """What clients send besides their update.

    Attributes:
        text: what it is, and why it tells of a client, in words.
        masked: whether masked sums cover it; differential privacy covers none of it.
        key: its key in the reply; "" = it is no record or metric.
    """

    text: str
    masked: bool = False
    key: str = ""


def disclosures(methods: Methods) -> list[Disclosure]:
    """Return what clients send, or let the server read, besides their update."""
    sent: list[Disclosure] = []
    for method in methods:
        sent += _sent_for(method)
    # Two methods may send the same, which is said once.
    return list(dict.fromkeys(sent))


def _sent_for(method: Method[Any, Any]) -> Iterator[Disclosure]:
    """Yield what one method makes clients send."""
    travels = together(declared(method))
    if Part.REST in travels.local:
        yield Disclosure("its clients share nothing, so there is nothing to protect")

    # Records and metrics; a metric that is only logged may be withheld.
    says_why = False
    for extra in travels.extras:
        if extra.size != "scalar" or extra.read != "log":
            says_why = True
            yield Disclosure(extra.why, key=extra.key)
    if travels.weights not in ("examples", "equal") and not says_why:
        yield Disclosure(
            f"the clients' {travels.weights} are the weights of the average"
        )

    # What travels between the messages of a round, and before tests.
    if travels.exchanges:
        yield _exchanges(travels.exchanges)
    if travels.reestimates:
        yield Disclosure(
            f"{method.title} collects statistics that are re-estimated on the clients'"
            " data"
        )

    # What the server reads of single replies, where a record has not said it already.
    if reads_unsaid(type(method)):
        kind = type(method).__name__
        yield Disclosure(
            f"{kind}.aggregate may read anything of single replies: say in"
            f" {kind}.travels what"
        )
    elif travels.each and not says_why:
        yield Disclosure(
            f"{method.title} reads the {', '.join(sorted(travels.each))} of single"
            " replies"
        )


def _exchanges(exchanges: Exchanges) -> Disclosure:
    text = (
        "the exchanges of its first step hold statistics of the clients' single batches"
    )
    # Sums over all clients can be masked.
    if exchanges.read == "mean":
        return Disclosure(text, masked=True)
    return Disclosure(
        f"{text}; with fedtan-exchanges=2L+1 the server computes more than sums of them"
    )


_INSTEAD = (
    "fedbn_flwr.privacy.DPWrapper weighs all clients alike and knows the parts of the"
    " model"
)


def check_wrapper(methods: Methods, parts: Parts) -> None:
    """Check that Flower's wrapper around the strategy, if any, does what it says.

    Warns of the weights of the clients, and of counters, which the wrapper treats as
    weights of the model.

    Raises:
        ConfigError: something of the clients bypasses the wrapper, or the wrapper would
            fail or break the methods.
    """
    # Flower's wrappers call us and say nothing: they are seen in the call stack.
    wrapper = calling_dp_wrapper()
    if not wrapper:
        return
    reasons = [disclosure.text for disclosure in disclosures(methods)]
    if methods.local and "ServerSide" in wrapper:
        reasons.append(
            "it needs the whole model in each reply, and the clients keep a part of it"
        )
    if methods.freezes_bn:
        reasons.append("it would add noise to frozen statistics")
    if reasons:
        raise ConfigError(
            f"{wrapper} around strategy {methods.name!r}: {'; '.join(reasons)}."
            f" {_INSTEAD}."
        )
    logger.warning(
        "%s expects that all clients weigh the same, and strategy %r weighs the clients"
        " by |D_i|, so that one of them can move the average by more than its noise is"
        " for: an epsilon from its noise multiplier alone would be too small. %s.",
        wrapper,
        methods.name,
        _INSTEAD,
    )
    if parts.counters:
        logger.warning(
            "%s clips and adds noise to BN's int64 counters and running statistics as"
            " if they were weights: the counters alone can take up the clipping norm,"
            " and variances can become negative. %s.",
            wrapper,
            _INSTEAD,
        )

r"""Masked sums (secure aggregation): the server sees the sum of updates, and no single
one.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", Figure 4, against a server that follows the protocol and is curious. This
file and ``privacy.masked_round`` are the server's half, ``client.masking`` is the
client's; ``privacy.masks`` has the masks, ``privacy.ring`` the numbers.

## Algorithm

A round of $m$ clients:

1. Each client sends two public keys.
2. Each client gets the keys of the others, and sends each of them encrypted shares of
   its secrets.
3. Each client gets the list of the others that are still there, trains, and sends
   $y_i$: its update in the coordinates of ``privacy.coordinates``, in fixed point,
   times its weight $|D_i|$, plus masks. In a synchronised step the tensors of the
   exchanges are masked in the same way.
4. The server says whose $y_i$ has arrived. Each client sends its shares of the others'
   secrets, once. The server takes the sum of the $y_i$, removes the masks that are
   left, and divides by the sum of the weights.

Below $t$ shares for a client, or if a client is lost in a synchronised step, the round
ends: nothing is revealed, and the previous model is kept.

## What travels

| | per round, beside the plain method |
|---|---|
| sent down | public keys and encrypted shares of the others, three queries |
| sent up | 8 bytes for each float (4 without masks, in float32); two keys, and an encrypted share for each other |
| not sent | integer entries; the server counts BN's counters by rounds |

## Differs from the paper

Masks come from ChaCha20 with a key of 256 bits, not from a generator with a seed of 32
bits (Flower's SecAgg+). The shares are delivered with the last query.

With differential privacy (``dp=client``) the clients clip before they mask, all weights
are 1, and the server adds its noise to the sum. That a client clips cannot be checked
then.

## Law

The result equals the average without masks but for the rounding of
``FixedPoint.error``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.errors import ConfigError, MaskingError, ReplyError
from fedbn_flwr.messages.protocol import FRESH_BATCHES, MASKED, NUM_EXAMPLES
from fedbn_flwr.messages.records import of_kind, state_sha256
from fedbn_flwr.privacy.coordinates import Coordinates
from fedbn_flwr.privacy.differential import ClientLevelDP
from fedbn_flwr.privacy.masked_round import MaskedRound
from fedbn_flwr.privacy.protection_settings import MaskSettings, mask_conflicts
from fedbn_flwr.privacy.ring import split
from fedbn_flwr.server.methods.disclosures import disclosures
from fedbn_flwr.server.methods.method import Facts, Node, Reply
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.server.runs.round_outcome import RoundOutcome
from fedbn_flwr.transport import Member
from fedbn_flwr.transport.step_transport import Limits, with_config

__all__ = ["MaskSettings", "MaskedSums", "refusals"]

logger = logging.getLogger("flwr")

_LACKS_COUNT = (
    "masked-sums=true weighs the clients by examples, and needs their number before the"
    " round: answer the query (docs/flower-projects.md)."
)
_REPEATS = (
    "its batches are all of its data, and a sum of this model may be known from before:"
    " with the same numbers the difference of the two sums could be those of a client"
    " that is lost in one of them"
)
_ANSWERS_ARE_PUBLIC = (
    "With masked-sums=true that is what a client sends, and not whether it answers:"
    " with too few answers the whole sum is 0."
)


def refusals(methods: Methods) -> list[str]:
    """Return what the methods take from single clients that no mask hides."""
    lines = []
    for disclosure in disclosures(methods):
        if disclosure.masked:
            continue
        line = f"strategy {methods.name!r} with masked-sums=true: {disclosure.text}"
        if disclosure.key:
            line += f" ({disclosure.key!r} in the reply)"
        lines.append(line)
    return lines


class MaskedSums(Protection):
    """Sums of masked updates.

    Args:
        settings: the threshold.
        dp: differential privacy whose updates the clients clip: all weights are 1, and
            it adds its noise to the sum.

    Raises:
        ConfigError: ``dp`` needs single updates.
    """

    reads_each = False
    # Metrics have no masks.
    publishes_metrics = False

    _masks: MaskedRound

    def __init__(self, settings: MaskSettings, dp: ClientLevelDP | None = None) -> None:
        if dp:
            problems = mask_conflicts(dp.settings)
            if problems:
                raise ConfigError("\n".join(problems))
        self.settings = settings
        self._dp = dp
        self._inner: Protection = dp or Protection()
        self.always_releases = self._inner.always_releases
        self._begin()

    def begin(self, methods: Methods, weighted_by_key: str) -> None:
        """Check that the method needs sums alone.

        Raises:
            ConfigError: it uses more of a client.
        """
        problems = refusals(methods)
        if weighted_by_key != NUM_EXAMPLES:
            problems.append(
                f"weighted_by_key={weighted_by_key!r}: masked sums are weighted by"
                f" {NUM_EXAMPLES}, which the server knows before the round"
            )
        if problems:
            raise ConfigError("\n".join(problems))
        self._begin()
        self._cohort_rounds = methods.params.cohort_rounds
        self._inner.begin(methods, weighted_by_key)

    def _begin(self) -> None:
        # SHA-256 of the weights of this round, and of the last ones of which a sum may
        # be known: a second sum of the same would tell a client that is in one alone.
        self._weights = self._known = ""
        # The number by which the clients of a resumed run draw new batches; 0 = none.
        self._fresh = 0
        self._resumed = self._warned = False
        self._cohort_rounds = 1

    def admits(self, facts: Facts, asked: int) -> bool:
        """Return whether differential privacy allows the round; masks allow each."""
        return self._inner.admits(facts, asked)

    def config(self) -> Mapping[str, Any]:
        """Return the config of differential privacy, and the number for new batches."""
        config = {**self._inner.config()}
        if self._fresh:
            config[FRESH_BATCHES] = self._fresh
        return config

    def protect_messages(
        self,
        facts: Facts,
        report: RoundOutcome,
        messages: Sequence[tuple[Node, Message]],
        grid: Grid,
        timeout: float,
    ) -> list[Message]:
        """Let the clients agree on masks (steps 1, 2); return messages to those left.

        Raises:
            ClientPartError: no client has the mod.
            ConfigError: all clients would repeat what they sent before.
        """
        self._warn_of_changes(facts, len(messages))
        self._weights = _weights_sha256(facts)
        if self._resumed:
            # The killed run may have summed what comes next.
            self._known, self._resumed = self._weights, False
        if not messages:
            return []
        nodes = [node for node, _ in messages]
        key, *_ = of_kind(messages[0][1].content, ConfigRecord)
        masks = MaskedRound(report, nodes, grid, timeout, bool(self._dp), key)
        self._masks = masks
        able = _able(masks, repeats=self._weights == self._known)
        if not masks.prepare(able, self.settings.masked_threshold):
            return []
        masked = []
        for number in sorted(masks.present):
            _, message = messages[number]
            masked.append(with_config(message, masks.config(number)))
        return masked

    def _warn_of_changes(self, facts: Facts, asked: int) -> None:
        """Warn once if the clients of the sums change: they tell of single clients."""
        if self._warned or asked >= facts.num_able:
            return
        # The same clients are drawn for that many rounds.
        rounds = facts.num_rounds
        if rounds is not None and rounds <= self._cohort_rounds:
            return
        self._warned = True
        logger.warning(
            "masked-sums=true with %d of %d clients in a round: the sums of changing"
            " clients are equations from which the server can solve what stays the same"
            " of a single client, such as its class mix. Masks do not hide that. Use"
            " fraction-train=1, cohort-rounds=%s (the same clients in all rounds), or"
            " noise (dp=client).",
            asked,
            facts.num_able,
            rounds or "ROUNDS",
        )

    def limits(self, limits: Limits, members: Mapping[int, Member]) -> Limits:
        """Return the limits of a step in which all stay, with masked exchanges.

        No shares are revealed for an exchange: with a client less its masks remain.
        """
        masks = self._masks
        present = {masks.nodes[number].node_id for number in masks.present}
        missing = present - members.keys()
        if missing:
            raise ConfigError(
                f"masked-sums=true: node {min(missing)} has masks, and takes no part in"
                " the synchronised step"
            )
        masks.whole = True

        def answer(
            tag: str, tensors: Sequence[Tensor], weights: Sequence[float]
        ) -> Tensor:
            total = masks.of_exchange(tag, tensors)
            # From here on a sum of these weights is known.
            self._known = self._weights
            return torch.from_numpy(masks.point.mean(total, math.fsum(weights)))

        return dataclasses.replace(limits, min_members=len(members), answer=answer)

    def expected(self, facts: Facts) -> State:
        """Ask for a masked vector in place of the entries."""
        size = sum(array.size for array in _like(facts).values())
        # Shape and dtype alone count, so a broadcast one takes no memory.
        return {MASKED: np.broadcast_to(np.int64(0), size)}

    def pool(
        self,
        facts: Facts,
        report: RoundOutcome,
        replies: Sequence[Reply],
        check: Callable[[Reply], None],
    ) -> Sequence[Reply]:
        """Return one reply with the average (step 4), or none if masks remain.

        With differential privacy such a round has a result, too: noise alone.
        """
        if not replies:
            return self._inner.pool(facts, report, replies, check)
        # The traffic has int64 as counters; these are the floats of the update.
        moved = report.train
        size = sum(reply.state[MASKED].nbytes for reply in replies)
        moved.up += size
        moved.counters_up -= size
        try:
            average = self._average(facts, replies, check)
        except (MaskingError, ReplyError) as error:
            # One client can spoil a sum, and nobody knows which.
            self._masks.give_up(str(error))
            return self._inner.pool(facts, report, [], check)
        if self._dp:
            # It sums what it gets: so many times the average, with equal weights.
            repeated = [average] * len(replies)
            return self._inner.pool(facts, report, repeated, check)
        return [average]

    def _average(
        self,
        facts: Facts,
        replies: Sequence[Reply],
        check: Callable[[Reply], None],
    ) -> Reply:
        """Return a reply with the average, which the method accepts.

        Raises:
            MaskingError: the masks cannot be removed.
            ReplyError: the sum is out of range, or the method refuses the average.
        """
        masks = self._masks
        vectors = masks.by_number(replies)
        try:
            mean = masks.mean(vectors)
        finally:
            # The sum may be known, also if shares come late or it is out of range.
            if masks.revealing:
                self._known = self._weights
        coordinates = Coordinates(facts.shared, facts.parts, scale=1.0)
        state = coordinates.state(split(mean, _like(facts)), 0.0)
        average = Reply(Node(0), masks.weight(vectors.keys()), state, {})
        check(average)
        # Integers are not masked: the counters count rounds.
        for name in facts.parts.whole.counters:
            if name in state:
                state[name] = state[name] + 1
        return average

    def stops_after(self, server_round: int) -> bool:
        """Return whether differential privacy ends the run after this round."""
        return self._inner.stops_after(server_round)

    def outcome(self) -> dict[str, Any]:
        """Return what differential privacy says in the summary, with a limit of masks.

        Masks do not hide whether a client answers.
        """
        found = self._inner.outcome()
        if self._dp and self._dp.guarantees:
            found["privacy"]["guarantee"] += f" {_ANSWERS_ARE_PUBLIC}"
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of differential privacy; masks last one round."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of differential privacy, and let clients draw new batches.

        Rounds may be repeated now. With the same batches and without a client that is
        lost this time, the difference of the two sums would be that client's update:
        the clients draw others, and those that cannot are left out.
        """
        self._fresh, self._resumed = secrets.randbits(62), True
        self._inner.load_state_dict(state)


def _like(facts: Facts) -> dict[str, Array]:
    """Return arrays like the values of a client."""
    shared = facts.shared
    return Coordinates(shared, facts.parts, scale=1.0).update(shared)


def _weights_sha256(facts: Facts) -> str:
    """Return a hash of what decides what clients send, if their batches are the same.

    In train mode BatchNorm's running statistics decide nothing.
    """
    parts = facts.parts.whole
    measured = {*parts.statistics, *parts.counters}
    weights = {
        name: array for name, array in facts.before.items() if name not in measured
    }
    return state_sha256(weights)


def _able(masks: MaskedRound, repeats: bool) -> list[int]:
    """Return the clients to ask; the others take no part.

    Args:
        masks: the round.
        repeats: whether a sum of this model may be known: then clients of one batch
            would send the same numbers again.

    Raises:
        ConfigError: all clients would.
    """
    able, repeating = [], 0
    for number, node in enumerate(masks.nodes):
        size = node.batch_size
        if not node.num_examples:
            masks.lose(number, _LACKS_COUNT)
        elif repeats and size is not None and size >= node.num_examples:
            masks.lose(number, _REPEATS)
            repeating += 1
        else:
            able.append(number)
    if repeating == len(masks.nodes):
        raise ConfigError(
            "masked-sums=true and a model of which a sum may be known: no client can"
            f" take part. Of each of them ({repeating}): {_REPEATS}. Take a smaller"
            " batch-size, or begin anew."
        )
    return able

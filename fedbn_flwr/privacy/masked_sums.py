r"""Masked sums (secure aggregation) that show the server only sums of updates.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", Figure 4, against a server that follows the protocol but is curious. This
file and ``privacy.masked_round`` have the server's code, and ``client.masking`` has the
client's code. ``privacy.masks`` has the masks, ``privacy.ring`` the numbers.

## Algorithm

A round of $m$ clients has four steps:

1. Each client sends two public keys.
2. Each client gets the keys of the others, and sends each of them encrypted shares of
   its secrets.
3. Each client gets the list of the other clients that are still present. It trains and
   sends $y_i$: its update in the coordinates of ``privacy.coordinates``, in fixed
   point, times its weight $|D_i|$, plus masks. In a synchronised step the tensors of
   the exchanges are masked in the same way.
4. The server names the clients whose $y_i$ has arrived. Each client sends its shares of
   the others' secrets, once. The server sums the $y_i$, removes the masks that are
   left, and divides by the sum of the weights.

With fewer than $t$ shares for a client, or if a client is lost in a synchronised step,
the round ends: nothing is revealed, and the previous model is kept.

## What travels

| | per round, in addition to the plain method |
|---|---|
| sent down | public keys and encrypted shares of the others, three queries |
| sent up | 8 bytes for each float (4 without masks, in float32), two keys, a share for each other client |
| not sent | integer entries; the server counts BN's counters by rounds |

## Differs from the paper

Masks come from ChaCha20 with a key of 256 bits, and not from a generator with a seed of
32 bits as in Flower's SecAgg+. The shares are delivered with the last query.

With differential privacy (``dp=client``), the clients clip before they mask, all
weights are 1, and the server adds its noise to the sum. Then nobody can check whether a
client clips.

## Law

The result equals the average without masks, except for the rounding of
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
from fedbn_flwr.messages.protocol import FRESH_BATCHES, MASKED
from fedbn_flwr.messages.records import of_kind, state_sha256
from fedbn_flwr.privacy.coordinates import Coordinates
from fedbn_flwr.privacy.differential import ClientLevelDP
from fedbn_flwr.privacy.masked_round import MaskedRound
from fedbn_flwr.privacy.protection_settings import MASKED_UPDATES, MaskSettings
from fedbn_flwr.privacy.ring import split
from fedbn_flwr.problems import Known, found_problems, tell
from fedbn_flwr.server.methods.check_protections import uncovered
from fedbn_flwr.server.methods.method import Facts, Node, Reply
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.server.runs.round_outcome import RoundOutcome
from fedbn_flwr.transport import Member
from fedbn_flwr.transport.step_transport import Limits, with_config

logger = logging.getLogger("flwr")

_LACKS_COUNT = (
    "masked-sums=true weights the clients by examples, so it needs their number before"
    " the round. Answer the query with fedbn_flwr.mods.answer_query."
)
_REPEATS = (
    "its batch contains all of its data, so it would send the same numbers again. But a"
    " sum of this model may already be known, and the difference of the two sums could"
    " be the update of a client that is missing in one of them"
)
_ANSWERS_ARE_PUBLIC = (
    "With masked-sums=true this covers the content of a client's answer, but not"
    " whether it answers: with too few answers the whole sum is 0."
)


class MaskedSums(Protection):
    """Sums of masked updates.

    Args:
        settings: the threshold.
        dp: differential privacy with updates that the clients clip. Then all weights
            are 1, and ``dp`` adds its noise to the sum.

    Raises:
        ConfigError: the server clips in ``dp`` (dp=server), so it needs single updates.
    """

    reads_each = False
    # The metrics of single clients are not published, because masks do not cover them.
    publishes_metrics = False

    _masks: MaskedRound

    def __init__(self, settings: MaskSettings, dp: ClientLevelDP | None = None) -> None:
        if dp:
            tell(found_problems([MASKED_UPDATES], dp.settings, Known()))
        self.settings = settings
        self._dp = dp
        self._inner: Protection = dp or Protection()
        self.always_releases = self._inner.always_releases
        self._begin()

    def begin(self, methods: Methods) -> None:
        """Check that the method needs only sums.

        Raises:
            ConfigError: the method needs more of a client.
        """
        tell(uncovered(methods, "masked-sums", "true"))
        self._begin()
        self._cohort_rounds = methods.params.cohort_rounds
        self._inner.begin(methods)

    def _begin(self) -> None:
        # ``_weights`` is the SHA-256 of this round's weights. ``_known`` is the SHA-256
        # of the last weights for which the server may know a sum of updates. A second
        # sum for the same weights would reveal a client that is only in one of the
        # sums.
        self._weights = self._known = ""
        # Number from which clients of a resumed run draw new batches; 0 means none.
        self._fresh = 0
        self._resumed = self._warned = False
        self._cohort_rounds = 1

    def admits(self, facts: Facts, asked: int) -> bool:
        """Return whether differential privacy allows the round.

        Masks allow every round.
        """
        return self._inner.admits(facts, asked)

    def config(self) -> Mapping[str, Any]:
        """Return the config of differential privacy, and the number for new batches.

        Clients of a resumed run draw new batches from this number.
        """
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
        """Let the clients agree on masks (steps 1, 2), and return messages for step 3.

        Only present clients get a message. If too few are present, nobody gets one.

        Raises:
            ClientPartError: no client has the mod.
            ConfigError: all clients would repeat their earlier numbers.
        """
        self._warn_of_changes(facts, len(messages))
        self._weights = _weights_sha256(facts)
        if self._resumed:
            # The killed run may already have summed the next round.
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
        """Warn once if the summed clients change, as this reveals single clients."""
        if self._warned or asked >= facts.num_able:
            return
        # The same clients are drawn for ``_cohort_rounds`` rounds.
        rounds = facts.num_rounds
        if rounds is not None and rounds <= self._cohort_rounds:
            return
        self._warned = True
        logger.warning(
            "masked-sums=true with %d of %d clients in a round: sums over changing"
            " clients are equations, and the server can solve them for constant"
            " properties of a single client, such as its class mix. Masks do not hide"
            " these. Use fraction-train=1, cohort-rounds=%s (the same clients in all"
            " rounds), or noise (dp=client).",
            asked,
            facts.num_able,
            rounds or "ROUNDS",
        )

    def limits(self, limits: Limits, members: Mapping[int, Member]) -> Limits:
        """Return the limits of a synchronised step with masked exchanges.

        All members must finish the step: no shares are revealed for an exchange, so the
        masks of a lost client would remain.

        Raises:
            ConfigError: a client with masks takes no part in the step.
        """
        masks = self._masks
        present = {masks.nodes[number].node_id for number in masks.present}
        missing = present - members.keys()
        if missing:
            raise ConfigError(
                f"masked-sums=true: node {min(missing)} has masks but takes no part in"
                " the synchronised step"
            )
        masks.all_must_answer = True

        def answer(
            tag: str, tensors: Sequence[Tensor], weights: Sequence[float]
        ) -> Tensor:
            total = masks.of_exchange(tag, tensors)
            # Note that the server now knows a sum for these weights. A second sum for
            # the same weights could reveal a single client.
            self._known = self._weights
            return torch.from_numpy(masks.point.mean(total, math.fsum(weights)))

        return dataclasses.replace(limits, min_members=len(members), answer=answer)

    def expected(self, facts: Facts) -> State:
        """Return a masked vector as the expected content of a reply."""
        size = sum(array.size for array in _like(facts).values())
        # Only shape and dtype count, so use a broadcast array, which takes no memory.
        return {MASKED: np.broadcast_to(np.int64(0), size)}

    def pool(
        self,
        facts: Facts,
        report: RoundOutcome,
        replies: Sequence[Reply],
        check: Callable[[Reply], None],
    ) -> Sequence[Reply]:
        """Return one reply with the average (step 4), or none if masks remain.

        With differential privacy, a round whose masks remain still has a result. This
        result is only noise.
        """
        if not replies:
            return self._inner.pool(facts, report, replies, check)
        # The report has counted these int64 values as counters, but they are floats of
        # the update.
        moved = report.train
        size = sum(reply.state[MASKED].nbytes for reply in replies)
        moved.up += size
        moved.counters_up -= size
        try:
            average = self._average(facts, replies, check)
        except (MaskingError, ReplyError) as error:
            # One client can spoil a sum, but nobody knows which client.
            self._masks.give_up(str(error))
            return self._inner.pool(facts, report, [], check)
        if self._dp:
            # Differential privacy sums its inputs, so pass the average once per reply.
            # This is possible because all weights are equal.
            repeated = [average] * len(replies)
            return self._inner.pool(facts, report, repeated, check)
        return [average]

    def _average(
        self,
        facts: Facts,
        replies: Sequence[Reply],
        check: Callable[[Reply], None],
    ) -> Reply:
        """Return a reply with the average after the method has accepted it.

        Raises:
            MaskingError: the masks cannot be removed.
            ReplyError: the sum is out of range, or the method refuses the average.
        """
        masks = self._masks
        vectors = masks.by_number(replies)
        try:
            mean = masks.mean(vectors)
        finally:
            # Once shares are revealed, the sum may be known, even if shares arrive late
            # or the sum is out of range.
            if masks.revealing:
                self._known = self._weights
        coordinates = Coordinates(facts.shared, facts.parts, scale=1.0)
        state = coordinates.state(split(mean, _like(facts)), 0.0)
        average = Reply(Node(0), masks.weight(vectors.keys()), state, {})
        check(average)
        # The masked sum has no integers, so no counter arrives. Add 1 to each counter
        # per round instead.
        for name in facts.parts.whole.counters:
            if name in state:
                state[name] = state[name] + 1
        return average

    def stops_after(self, server_round: int) -> bool:
        """Return whether differential privacy ends the run after this round."""
        return self._inner.stops_after(server_round)

    def outcome(self) -> dict[str, Any]:
        """Return the outcome of differential privacy.

        If there is a guarantee, it also states that masks do not hide whether a client
        answers.
        """
        found = self._inner.outcome()
        if self._dp and self._dp.guarantees:
            found["privacy"]["guarantee"] += f" {_ANSWERS_ARE_PUBLIC}"
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of differential privacy. Masks last only one round."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of differential privacy, and let clients draw new batches.

        A resumed run may repeat rounds. If a client with the same batches is missing in
        the second sum, the difference of the two sums would be its update. Therefore
        the clients draw new batches, and clients that cannot do so are left out.
        """
        self._fresh, self._resumed = secrets.randbits(62), True
        self._inner.load_state_dict(state)


def _like(facts: Facts) -> dict[str, Array]:
    """Return arrays with the names and shapes of a client's unmasked values."""
    shared = facts.shared
    return Coordinates(shared, facts.parts, scale=1.0).update(shared)


def _weights_sha256(facts: Facts) -> str:
    """Return a hash of the weights that determine the clients' updates.

    With equal weights and equal batches, a client sends the same update again.
    BatchNorm's running statistics are left out, because they have no effect in train
    mode.
    """
    parts = facts.parts.whole
    measured = {*parts.statistics, *parts.counters}
    weights = {
        name: array for name, array in facts.before.items() if name not in measured
    }
    return state_sha256(weights)


def _able(masks: MaskedRound, repeats: bool) -> list[int]:
    """Return the numbers of the clients to ask, and report the others as lost.

    Args:
        masks: the round.
        repeats: whether the server may know a sum for this model. If so, clients with
            only one batch would send the same numbers again.

    Raises:
        ConfigError: all clients would send the same numbers again.
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
            "masked-sums=true: no client can take part, because a sum of this model may"
            f" already be known. For each of the {repeating} clients: {_REPEATS}. Use a"
            " smaller batch-size, or start again."
        )
    return able

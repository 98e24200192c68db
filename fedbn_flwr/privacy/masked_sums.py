r"""Masked sums (secure aggregation): the server sees the sum of the clients' updates, and no single one.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", Figure 4, against a server
that follows the protocol and is curious. This file and ``privacy.masked_round`` are the server's half,
``client.masking`` is the client's; ``privacy.masks`` has the masks, ``privacy.ring`` the numbers.

## Algorithm

A round of $m$ clients:

1. Each client sends two public keys.
2. Each client gets the keys of the others, and sends each of them encrypted shares of its secrets.
3. Each client gets the list of the others that are still there, trains, and sends $y_i$: its update in the
   coordinates of ``privacy.coordinates``, in fixed point, times its weight $|D_i|$, plus masks. In a synchronised step
   the tensors of the exchanges are masked in the same way.
4. The server says whose $y_i$ has arrived. Each client sends its shares of the others' secrets, once. The server takes
   the sum of the $y_i$, removes the masks that are left, and divides by the sum of the weights.

Below $t$ shares for a client, or if a client is lost in a synchronised step, the round ends: nothing is revealed, and
the previous model is kept.

## What travels

| | per round, beside the plain method |
|---|---|
| sent down | public keys and encrypted shares of the others, three queries |
| sent up | 8 bytes for each float (4 without masks, in float32); two keys, and an encrypted share for each other |
| not sent | integer entries; the server counts BN's counters by rounds |

## Differs from the paper

Masks come from ChaCha20 with a key of 256 bits, not from a generator with a seed of 32 bits (Flower's SecAgg+). The
shares are delivered with the last query.

With differential privacy (``dp=client``) the clients clip before they mask, all weights are 1, and the server adds its
noise to the sum. That a client clips cannot be checked then.

## Law

The result equals the average without masks but for the rounding of ``FixedPoint.error``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.batchnorm.reestimation import Moments
from fedbn_flwr.errors import ConfigError, MaskingError, ReplyError
from fedbn_flwr.messages.protocol import FRESH_BATCHES, MASKED, NUM_EXAMPLES
from fedbn_flwr.messages.records import state_sha256
from fedbn_flwr.privacy.coordinates import Coordinates
from fedbn_flwr.privacy.differential import ClientLevelDP
from fedbn_flwr.privacy.masked_round import MaskedRound
from fedbn_flwr.privacy.masked_values import buffers_of, model_values, pooled_statistics, statistics_like
from fedbn_flwr.privacy.ring import split
from fedbn_flwr.privacy.settings import MaskSettings, mask_conflicts
from fedbn_flwr.server.method import Reply
from fedbn_flwr.server.methods import Methods
from fedbn_flwr.server.momentum import MOMENTUM
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.protection import Protection
from fedbn_flwr.server.replies import Terms
from fedbn_flwr.server.run import Run
from fedbn_flwr.server.sent_beside import sent_beside
from fedbn_flwr.server.synchronised_step import Limits, with_config
from fedbn_flwr.transport import Member
from fedbn_flwr.transport.polling_grid import polling

__all__ = ["MaskSettings", "MaskedSums", "beside_sums", "changing_sums", "refusals"]

logger = logging.getLogger("flwr")

_LACKS_COUNT = (
    "masked-sums=true weighs the clients by examples, and needs their number before the round: answer the query (docs/"
    "flower-projects.md)."
)
_REPEATS = (
    "its batches are all of its data, and sums of this model may be known from before: with the same numbers the "
    "difference of the two sums could be those of a client that is lost in one of them"
)
_ANSWERS_ARE_PUBLIC = (
    "With masked-sums=true that is what a client sends, and not whether it answers: with too few answers the whole sum "
    "is 0."
)


def beside_sums(methods: Methods) -> list[str]:
    """Return what the methods take from single clients that is no sum over them."""
    return [beside.text for beside in sent_beside(methods) if not beside.masked]


def refusals(methods: Methods) -> list[str]:
    """Return why the methods do not work with masks, one line each.

    Of the records that clients send, the masks cover SGD's momentum alone, also where a mean is all that is read.
    """
    lines = []
    for beside in sent_beside(methods):
        if not beside.masked:
            named = f" ({beside.key!r} in the reply)" if beside.key else ""
            lines.append(f"strategy {methods.name!r} with masked-sums=true: {beside.text}{named}")
    return lines


def changing_sums(asked: int, able: int, cohort_rounds: int, num_rounds: int | None) -> str:
    """Return the warning of sums whose clients change: they tell of single clients; "" where they do not change.

    Args:
        asked: clients of a round.
        able: clients that could train.
        cohort_rounds: rounds in a row with the same clients.
        num_rounds: rounds of the run; None = not known.
    """
    if asked >= able or (num_rounds is not None and num_rounds <= cohort_rounds):
        return ""
    return (
        f"masked-sums=true with {asked} of {able} clients in a round: the sums of changing clients are equations from "
        "which the server can solve what stays the same of a single client, such as its class mix. Masks do not hide "
        f"that. Use fraction-train=1, cohort-rounds={num_rounds or 'ROUNDS'} (the same clients in all rounds), or "
        "noise (dp=client)."
    )


class RepeatedSums:
    """What the server may know of earlier sums: whether there was one of the weights that are used now."""

    def __init__(self) -> None:
        self._weights = self._known = ""  # SHA-256 of the weights, and of the last of which a sum may be known
        self._resumed = False

    def resume(self) -> None:
        """Note that the run may have gone on before from the weights that come next."""
        self._resumed = True

    def begin(self, weights: State) -> bool:
        """Begin with these weights; return whether a sum of them may be known."""
        self._weights = state_sha256(weights)
        if self._resumed:
            self._known, self._resumed = self._weights, False
        return self._weights == self._known

    def note_sum(self) -> None:
        """Note that a sum of the weights may be known."""
        self._known = self._weights


class MaskedSums(Protection):
    """Sums of masked updates.

    Args:
        settings: the threshold.
        dp: differential privacy whose updates the clients clip: all weights are 1, and it adds its noise to the sum.

    Raises:
        ConfigError: ``dp`` needs single updates.
    """

    reads_each = False
    publishes_metrics = False  # they have no masks

    def __init__(self, settings: MaskSettings, dp: ClientLevelDP | None = None) -> None:
        if problems := mask_conflicts(dp.settings) if dp else ():
            raise ConfigError("\n".join(problems))
        self.settings = settings
        self._dp = dp
        self._inner: Protection = dp or Protection()
        self.always_releases = self._inner.always_releases
        self._terms: Terms | None = None
        self._masks: MaskedRound | None = None
        self._training, self._statistics, self._fresh = RepeatedSums(), RepeatedSums(), 0
        self._warned = False

    def begin(self, methods: Methods, weighted_by_key: str) -> None:
        """Check that the method needs sums alone.

        Raises:
            ConfigError: it uses more of a client.
        """
        problems = refusals(methods)
        if weighted_by_key != NUM_EXAMPLES:
            problems.append(
                f"weighted_by_key={weighted_by_key!r}: masked sums are weighted by {NUM_EXAMPLES}, which the "
                "server knows before the round"
            )
        if problems:
            raise ConfigError("\n".join(problems))
        self._terms = self._masks = None
        self._training, self._statistics, self._fresh = RepeatedSums(), RepeatedSums(), 0
        self._warned = False
        self._inner.begin(methods, weighted_by_key)

    def admits(self, run: Run, asked: int) -> bool:
        """Return whether differential privacy, if there is any, allows the round; masks allow each."""
        return self._inner.admits(run, asked)

    def config(self) -> Mapping[str, Any]:
        """Return the config of differential privacy; in a resumed run also a number: clients draw new batches by it."""
        config = dict(self._inner.config())
        if self._fresh:
            config[FRESH_BATCHES] = self._fresh
        return config

    def open_round(
        self, run: Run, messages: Sequence[tuple[Node, Message]], grid: Grid, timeout: float
    ) -> list[Message]:
        """Let the clients agree on masks (steps 1 and 2); return the messages to those that are left.

        Raises:
            ClientPartError: no client has the mod.
            ConfigError: all clients would repeat what they sent before.
        """
        self._warn_of_changes(run, len(messages))
        weights = _weights(run, run.before)
        known = [sums.begin(weights) for sums in (self._training, self._statistics)]
        return self._agreed(run, messages, grid, timeout, any(known))

    def _warn_of_changes(self, run: Run, asked: int) -> None:
        """Warn once if the clients of the sums change."""
        text = changing_sums(asked, run.num_able, run.methods.params.cohort_rounds, run.num_rounds)
        if text and not self._warned:
            logger.warning("%s", text)
        self._warned = self._warned or bool(text)

    def open_statistics(
        self, run: Run, messages: Sequence[tuple[Node, Message]], grid: Grid, timeout: float, before: State
    ) -> list[Message]:
        """Do so for re-estimated statistics, with new keys; nobody is asked a second time for those of a model."""
        weights = _weights(run, before)
        trained = self._training.begin(weights)
        if self._statistics.begin(weights):
            logger.warning(
                "round %d: the sum of this model's statistics may be known; a second sum over other clients would tell "
                "the difference: nobody is asked",
                run.report.server_round,
            )
            return []
        return self._agreed(run, messages, grid, timeout, trained)

    def _agreed(
        self, run: Run, messages: Sequence[tuple[Node, Message]], grid: Grid, timeout: float, again: bool
    ) -> list[Message]:
        """Return the messages to the clients that agree on masks; ``again``: without those that repeat their sums."""
        if not messages:
            return []
        masks = MaskedRound(run.report, [node for node, _ in messages], polling(grid), timeout, bool(self._dp))
        self._masks = None
        if not masks.prepare(_able(masks, again), self.settings.masked_threshold):
            return []
        self._masks = masks
        return [with_config(messages[number][1], masks.config(number)) for number in sorted(masks.present)]

    def limits(self, limits: Limits, members: Mapping[int, Member]) -> Limits:
        """Return the limits of a step in which all stay to the end, and whose exchanges are masked sums."""
        masks = self._masks_or_raise
        if missing := {masks.nodes[number].node_id for number in masks.present} - members.keys():
            raise ConfigError(
                f"masked-sums=true: node {min(missing)} has masks, and takes no part in the synchronised step"
            )
        masks.whole = True

        def answer(tag: str, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
            total = masks.of_exchange(tag, tensors)
            self._training.note_sum()
            return torch.from_numpy(masks.point.mean(total, math.fsum(weights)))

        return dataclasses.replace(limits, min_members=len(members), answer=answer)

    def terms(self, terms: Terms) -> Terms:
        """Ask for a masked vector in place of the entries."""
        self._terms = terms
        size = _size(_like(terms))
        return dataclasses.replace(terms, expected={MASKED: np.broadcast_to(np.int64(0), size)})

    def pool(self, run: Run, replies: Sequence[Reply], before: State) -> Sequence[Reply]:
        """Return one reply with the average (step 4), or none if the masks cannot be removed.

        With differential privacy such a round has a result, too: noise alone.
        """
        if not replies:
            return self._inner.pool(run, replies, before)
        moved, floats = run.report.train, sum(reply.state[MASKED].nbytes for reply in replies)
        moved.up, moved.counters_up = moved.up + floats, moved.counters_up - floats
        vectors = self._masks_or_raise.by_number([(reply.node, reply.state) for reply in replies])
        try:
            average = self._average(run, vectors)
        except (MaskingError, ReplyError) as error:  # one client can spoil a sum, and nobody knows which
            self._masks_or_raise.give_up(str(error))
            return self._inner.pool(run, [], before)
        return self._inner.pool(run, [average] * len(vectors), before) if self._dp else [average]

    def _average(self, run: Run, vectors: Mapping[int, Array]) -> Reply:
        """Return a reply with the average of these clients' values, which the method accepts; it counts the round.

        Raises:
            MaskingError: the masks cannot be removed.
            ReplyError: the sum is out of range, or the method refuses the average.
        """
        terms = self._terms_or_raise
        shared = terms.expected
        values = split(self._mean(vectors, self._training), _like(terms))
        state = Coordinates(shared, run.parts, scale=1.0).state(values, 0.0)
        extras: dict[str, State] = {MOMENTUM: buffers_of(values, shared)} if MOMENTUM in terms.extras else {}
        average = Reply(Node(0), self._masks_or_raise.weight(vectors.keys()), state, {}, extras)
        terms.check(average)
        state.update({name: state[name] + 1 for name in run.parts.counters if name in state})
        return average

    def _mean(self, vectors: Mapping[int, Array], sums: RepeatedSums) -> Array:
        """Return the mean of these clients' vectors; see ``MaskedRound.mean`` for what it raises."""
        masks = self._masks_or_raise
        try:
            return masks.mean(vectors)
        finally:
            if masks.revealing:  # the sum may be known, also if shares come late or it is out of range
                sums.note_sum()

    def check_statistics(self, run: Run, state: State, before: State) -> None:
        """Refuse anything but a masked vector."""
        size, vector = _size(statistics_like(before)), state.get(MASKED)
        if vector is None or len(state) > 1 or vector.dtype != np.int64 or vector.shape != (size,):
            raise ReplyError(f"a masked vector of {size} int64 needed, and {', '.join(sorted(state))} sent")

    def statistics(self, run: Run, replies: Sequence[tuple[Node, State]], before: State) -> list[Mapping[str, Moments]]:
        """Return the moments of all clients' data together."""
        if not replies:
            return []
        masks = self._masks_or_raise
        vectors = masks.by_number(replies)
        try:
            values = split(self._mean(vectors, self._statistics), statistics_like(before))
            return [pooled_statistics(values, masks.weight(vectors.keys()), before)]
        except (MaskingError, ReplyError) as error:
            masks.give_up(str(error))
            return []

    def stops_after(self, server_round: int) -> bool:
        """Return whether differential privacy ends the run after this round; masks end none."""
        return self._inner.stops_after(server_round)

    def outcome(self) -> dict[str, Any]:
        """Return what differential privacy says in the summary, and that masks do not hide whether a client answers."""
        found = self._inner.outcome()
        if self._dp and self._dp.guarantees:
            found["privacy"]["guarantee"] += f" {_ANSWERS_ARE_PUBLIC}"
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of differential privacy; masks last one round, and nothing of them is kept."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of differential privacy, and let clients draw new batches.

        Rounds may be repeated now. With the same batches and without a client that is lost this time, the difference of
        the two sums would be that client's update: the clients draw others, and those that cannot are left out.
        """
        self._fresh = secrets.randbits(62)
        self._training.resume()
        self._statistics.resume()
        self._inner.load_state_dict(state)

    @property
    def _terms_or_raise(self) -> Terms:
        if self._terms is None:
            raise ConfigError("MaskedSums has no terms yet: call terms() first; a strategy does so in each round")
        return self._terms

    @property
    def _masks_or_raise(self) -> MaskedRound:
        if self._masks is None:
            raise ConfigError("MaskedSums has no masks yet: call open_round() or open_statistics() first")
        return self._masks


def _like(terms: Terms) -> dict[str, Array]:
    """Return arrays like the values of a client in training."""
    buffers: State | None = {} if MOMENTUM in terms.extras else None
    return model_values(terms.expected, terms.expected, buffers, terms.facts.parts)


def _weights(run: Run, model: State) -> State:
    """Return what decides what clients send, if their batches are the same: not what BN has measured."""
    measured = {*run.parts.statistics, *run.parts.counters}
    return {name: array for name, array in model.items() if name not in measured}


def _able(masks: MaskedRound, again: bool) -> list[int]:
    """Return the clients to ask; the others take no part. ``again``: without those that would repeat their sums.

    Raises:
        ConfigError: all clients would.
    """
    left_out = {number: _LACKS_COUNT for number, node in enumerate(masks.nodes) if not node.num_examples}
    if again:
        left_out |= {number: _REPEATS for number, node in enumerate(masks.nodes) if _has_one_batch(node)}
    for number, why in left_out.items():
        masks.lose(number, why)
    if set(left_out.values()) == {_REPEATS} and len(left_out) == len(masks.nodes):
        raise ConfigError(
            "masked-sums=true and a model of which a sum may be known: no client can take part. Of each of them "
            f"({len(masks.nodes)}): {_REPEATS}. Take a smaller batch-size, leave recalibrate out, or begin anew."
        )
    return [number for number in range(len(masks.nodes)) if number not in left_out]


def _has_one_batch(node: Node) -> bool:
    """Return whether the node has no more examples than a batch, as far as it has said."""
    return node.batch_size is not None and node.batch_size >= (node.num_examples or 0)


def _size(values: Mapping[str, Array]) -> int:
    return sum(array.size for array in values.values())

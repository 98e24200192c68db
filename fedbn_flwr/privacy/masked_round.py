"""The server's code for a round of masked sums, with three queries and the mean.

The queries ask for public keys (step 1 of ``privacy.masked_sums``), for encrypted
shares (step 2) and for unencrypted shares (step 4). ``privacy.masks`` has the
algorithm, ``client.masking`` has the clients' answers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.errors import ClientPartError, MaskingError, ReplyError
from fedbn_flwr.messages.protocol import (
    MASK_ANSWERED,
    MASK_EQUAL,
    MASK_KEYS,
    MASK_LOST,
    MASK_NUMBER,
    MASK_NUMBERS,
    MASK_PRESENT,
    MASK_REPLY,
    MASK_SHARES,
    MASK_STAGE,
    MASK_THRESHOLD,
    MASK_TOTAL,
    MASK_WEIGHT,
    MASKED,
    SERVER_ROUND,
    without_empty,
)
from fedbn_flwr.privacy.masks import (
    PublicKeys,
    about,
    add_pair_mask,
    recovered_key,
    recovered_seed,
    seed_mask,
)
from fedbn_flwr.privacy.ring import FixedPoint
from fedbn_flwr.server.methods.method import Node, Reply
from fedbn_flwr.server.rounds.replies import error_text
from fedbn_flwr.server.runs.round_outcome import RoundOutcome

logger = logging.getLogger("flwr")

_LACKS_MOD = (
    "its app does not answer the queries of masked sums. Make `masked_update` of"
    " fedbn_flwr.mods the app's first mod."
)
Read = TypeVar("Read")
# Entries of a query, or of the answer to a query.
Entries = Mapping[str, Any]


@dataclass
class Answers(Generic[Read]):
    """The outcome of a query. Each asked client is in one of the two mappings.

    Attributes:
        read: the content of the client's answer, by the client's number.
        failed: the reason for a missing answer, by the client's number.
    """

    read: dict[int, Read]
    failed: dict[int, str]


@dataclass
class MaskedRound:
    """The masks of a round and its sums.

    A client's number is the position of its node in ``nodes``.

    Attributes:
        report: the report of the round, which names lost clients.
        nodes: the sampled nodes.
        grid: sends the queries to the nodes.
        timeout: seconds to wait for the answers to a query.
        equal: whether all weights are 1. Otherwise a client's weight is its number of
            examples.
        config_key: name of a message's config.
        present: the clients that have sent their shares, so they train.
        threshold: t, the number of shares that give a secret; 0 before ``prepare``.
        all_must_answer: whether all clients must have answered, because exchanges of
            this round have revealed sums over all clients.
        revealing: whether clients were asked for unencrypted shares. Afterwards the sum
            may be known.
    """

    report: RoundOutcome
    nodes: Sequence[Node]
    grid: Grid
    timeout: float
    equal: bool
    config_key: str
    present: frozenset[int] = frozenset()
    threshold: int = 0
    all_must_answer: bool = False
    revealing: bool = False
    _keys: dict[int, PublicKeys] = field(default_factory=dict)
    # Encrypted shares by receiver and then by sender. The server delivers them with the
    # last query.
    _encrypted: dict[int, dict[int, bytes]] = field(default_factory=dict)

    def prepare(self, asked: Sequence[int], share: float) -> bool:
        """Exchange keys and shares, and return whether enough clients are left.

        Args:
            asked: the clients to ask.
            share: the setting ``masked-threshold``, a share of the asked clients.

        Raises:
            ClientPartError: no client has the mod.
        """
        # The threshold is a share of the asked clients, so lost clients do not lower
        # the threshold. It is above half, so that nobody can have both secrets of a
        # client.
        self.threshold = max(math.ceil(share * len(asked)), len(asked) // 2 + 1, 2)
        answers = self._ask("keys", {number: {} for number in asked}, _keys)
        self._keys = self._lose_failed(answers)
        left = len(self._keys)
        if left >= self.threshold:
            self.present = self._exchange_shares()
            left = len(self.present)
        if left < self.threshold:
            self.give_up(
                f"{left} of {len(self.nodes)} clients are left, too few for the masks"
                " of the round"
            )
            return False
        return True

    def _exchange_shares(self) -> frozenset[int]:
        """Send all public keys, keep the encrypted shares, and return their senders.

        The server cannot read the shares, because each is encrypted for one client.
        """
        numbers = sorted(self._keys)
        common: Entries = {
            MASK_NUMBERS: numbers,
            MASK_KEYS: [key for number in numbers for key in self._keys[number]],
            MASK_THRESHOLD: self.threshold,
        }
        configs = {number: {**common, MASK_NUMBER: number} for number in numbers}
        sent = self._lose_failed(self._ask("shares", configs, _by_number))
        senders = []
        for number, shares in sent.items():
            # If one share is missing, the client's masks may not be removable from the
            # sum.
            if shares.keys() != {*numbers} - {number}:
                self.lose(
                    number,
                    "it did not send exactly one share for each other client of the"
                    " round",
                )
                continue
            senders.append(number)
            for receiver, encrypted in shares.items():
                self._encrypted.setdefault(receiver, {})[number] = encrypted
        return frozenset(senders)

    def others(self, number: int) -> list[int]:
        """Return all present clients except this one."""
        return sorted(self.present - {number})

    def left_over(self, answered: frozenset[int], size: int) -> Array:
        """Return the masks that remain in the sum of these clients' vectors.

        Each vector has the mask of its seed. The pair masks of two clients that
        answered cancel, but pair masks with a lost client remain.

        Args:
            answered: the clients whose vectors are in the sum.
            size: the size of a vector.

        Raises:
            MaskingError: the sum has too few clients, or fewer than t shares of a
                secret have arrived. Or a client was lost after a synchronised step:
                then the difference between the sum of an exchange and this sum could be
                the client's gradient.
        """
        lost = self.present - answered
        if self.all_must_answer and lost:
            raise MaskingError(
                f"{len(lost)} client(s) were lost after the synchronised step"
            )
        if len(answered) < self.threshold:
            raise MaskingError(
                f"{len(answered)} of the clients answered, fewer than the required"
                f" {self.threshold}"
            )
        shares = self._reveal(answered)
        server_round = self.report.server_round
        told = about(self.weight(self.present), self.equal)
        left = np.zeros(size, np.int64)
        for number in sorted(self.present):
            # t shares give the secret. Leave out further shares, because they would
            # have to fit as well.
            of_secret = shares[number][: self.threshold]
            if len(of_secret) < self.threshold:
                raise MaskingError(
                    f"{len(of_secret)} of the shares for {self.nodes[number]} arrived,"
                    f" fewer than the required {self.threshold}"
                )
            if number in answered:
                left += seed_mask(recovered_seed(of_secret), server_round, size)
                continue
            # The key of the lost client gives its pair masks. The other clients have
            # added them with their own sign.
            secret = recovered_key(of_secret, self._keys[number].masks)
            for other in sorted(answered):
                public = self._keys[other].masks
                add_pair_mask(left, other, number, secret, public, server_round, told)
        return left

    def _reveal(self, answered: frozenset[int]) -> Mapping[int, Sequence[bytes]]:
        """Ask for one share of each present client, and return the shares by owner.

        For a client that has answered, its seed b is revealed. For a lost client, its
        key s is revealed.
        """
        common: Entries = {
            MASK_ANSWERED: sorted(answered),
            MASK_LOST: sorted(self.present - answered),
        }
        configs = {}
        for number in answered:
            others = self.others(number)
            encrypted = [self._encrypted[number][other] for other in others]
            configs[number] = {**common, MASK_NUMBERS: others, MASK_SHARES: encrypted}

        # Set the flag before the query, because late answers also reveal shares.
        self.revealing = True
        answers = self._ask("reveal", configs, _by_number)
        for number, why in answers.failed.items():
            # A client that fails here is not lost. Its vector is in the sum, and the
            # shares of t other clients are enough.
            self._warn(f"{self.nodes[number]}: {why}")
        shares: dict[int, list[bytes]] = {owner: [] for owner in self.present}
        for of_client in answers.read.values():
            for owner in self.present & of_client.keys():
                shares[owner].append(of_client[owner])
        return shares

    @property
    def point(self) -> FixedPoint:
        """The fixed-point numbers of the sum."""
        return FixedPoint(self.weight(self.present))

    def config(self, number: int) -> dict[str, Any]:
        """Return the information about the sum for a client."""
        return {
            MASK_TOTAL: self.weight(self.present),
            MASK_EQUAL: self.equal,
            MASK_PRESENT: self.others(number),
            MASK_WEIGHT: self.weight({number}),
        }

    def weight(self, numbers: Collection[int]) -> float:
        """Return the sum of these clients' weights."""
        if self.equal:
            return float(len(numbers))
        return float(sum(self.nodes[number].num_examples or 0 for number in numbers))

    def by_number(self, replies: Sequence[Reply]) -> dict[int, Array]:
        """Return the masked vectors by the clients' numbers."""
        number_of = {node.node_id: number for number, node in enumerate(self.nodes)}
        return {number_of[reply.node.node_id]: reply.state[MASKED] for reply in replies}

    def mean(self, vectors: Mapping[int, Array]) -> Array:
        """Return the weighted mean of these clients' vectors without masks (step 4).

        Raises:
            MaskingError: the masks cannot be removed.
            ReplyError: the sum is out of range.
        """
        answered = frozenset(vectors)
        total = _sum(list(vectors.values()))
        unmasked = total - self.left_over(answered, total.size)
        return self.point.mean(unmasked, self.weight(answered))

    def of_exchange(self, tag: str, tensors: Sequence[Tensor]) -> Array:
        """Return the int64 sum of an exchange's tensors. All masks cancel in this sum.

        Raises:
            ReplyError: a client's tensor is missing, or has no masks.
        """
        dtypes = {tensor.dtype for tensor in tensors}
        if len(tensors) < len(self.present) or dtypes != {torch.int64}:
            raise ReplyError(
                f"exchange '{tag}' needs a masked tensor of int64 from each client"
            )
        return _sum([tensor.numpy() for tensor in tensors])

    def lose(self, number: int, why: str) -> None:
        """Report that a client no longer takes part."""
        node = self.nodes[number]
        self.report.reject(node, why)
        self._warn(f"{node}: {why}")

    def give_up(self, why: str) -> None:
        """Report that the round ends without a result."""
        self._warn(f"{why}: nothing is revealed")
        for node in self.nodes:
            if node.node_id not in self.report.rejected:
                self.report.reject(node, f"{why}: nothing is revealed")

    def _warn(self, text: str) -> None:
        logger.warning("round %d: %s", self.report.server_round, text)

    def _lose_failed(self, answers: Answers[Read]) -> dict[int, Read]:
        """Return the read answers, and report clients without an answer as lost."""
        for number, why in answers.failed.items():
            self.lose(number, why)
        return answers.read

    def _ask(
        self,
        stage: str,
        configs: Mapping[int, Entries],
        read: Callable[[Entries], Read],
    ) -> Answers[Read]:
        """Send the query of a stage to clients, and return the outcome.

        Raises:
            ClientPartError: no asked client has the mod.
        """
        # Clients that do not answer in time keep this reason.
        why = f"no answer to '{stage}' of the masks"
        answers = Answers[Read]({}, dict.fromkeys(sorted(configs), why))
        number_of = {self.nodes[number].node_id: number for number in configs}
        queries = [
            self._query(stage, number, config) for number, config in configs.items()
        ]
        self.report.train.exchanges += 1
        for reply in self.grid.send_and_receive(queries, timeout=self.timeout):
            number = number_of[reply.metadata.src_node_id]
            if reply.has_error():
                answers.failed[number] = error_text(reply)
            elif MASK_REPLY not in reply.content:
                answers.failed[number] = _LACKS_MOD
            else:
                # Catch the errors, because a client may send any content.
                try:
                    found = read(reply.content.config_records[MASK_REPLY])
                except (KeyError, TypeError, ValueError) as error:
                    answers.failed[number] = (
                        "its answer about the masks cannot be read:"
                        f" {type(error).__name__}: {error}"
                    )
                else:
                    answers.read[number] = found
                    answers.failed.pop(number, None)

        # If all clients lack the mod, this is an error of the project, not of clients.
        if configs and list(answers.failed.values()) == [_LACKS_MOD] * len(configs):
            first = next(iter(configs))
            raise ClientPartError(f"{self.nodes[first]}: {_LACKS_MOD}")
        return answers

    def _query(self, stage: str, number: int, config: Entries) -> Message:
        record = ConfigRecord(
            {
                MASK_STAGE: stage,
                SERVER_ROUND: self.report.server_round,
                **without_empty(config),
            }
        )
        content = RecordDict({self.config_key: record})
        return Message(content, self.nodes[number].node_id, MessageType.QUERY)


def _sum(vectors: Sequence[Array]) -> Array:
    """Return the sum in the ring, in int64 that wraps around."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total


def _keys(answer: Entries) -> PublicKeys:
    masks, channel = answer[MASK_KEYS]
    return PublicKeys(_bytes(masks), _bytes(channel))


def _by_number(answer: Entries) -> dict[int, bytes]:
    shares = map(_bytes, answer.get(MASK_SHARES, ()))
    return dict(zip(answer.get(MASK_NUMBERS, ()), shares, strict=True))


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} instead of bytes")
    return value

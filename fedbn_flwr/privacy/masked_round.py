"""The server's half of a round of masked sums: the three queries, who is left, the
weights, and the mean.

``privacy.masks`` has the algorithm, ``client.masking`` the clients' answers.
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
from fedbn_flwr.server.methods.method import Reply
from fedbn_flwr.server.methods.node import Node
from fedbn_flwr.server.rounds.replies import error_text
from fedbn_flwr.server.runs.report import RoundReport

__all__ = ["MaskedRound"]

logger = logging.getLogger("flwr")

_QUERY = "config"  # the record of a query
_LACKS_MOD = (
    "its app does not answer the queries of masked sums. Make `masked_update` of"
    " fedbn_flwr.mods the app's first mod."
)
Read = TypeVar("Read")


@dataclass
class Answers(Generic[Read]):
    """The answers to a query of the masks, by the number of the client.

    Attributes:
        read: what was asked for.
        faults: why there is nothing to read, of clients that have replied.
    """

    read: dict[int, Read] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)

    def add(
        self, number: int, reply: Message, read: Callable[[Mapping[str, Any]], Read]
    ) -> None:
        """Add a client's reply."""
        if reply.has_error():
            self.faults[number] = error_text(reply)
        elif MASK_REPLY not in reply.content:
            self.faults[number] = _LACKS_MOD
        else:
            try:
                self.read[number] = read(reply.content.config_records[MASK_REPLY])
            # a client may send anything
            except (KeyError, TypeError, ValueError) as error:
                self.faults[number] = (
                    f"its answer on the masks cannot be read: {type(error).__name__}:"
                    f" {error}"
                )


@dataclass
class MaskedRound:
    """The masks of a round and its sums. A client's number is the position of its node
    in ``nodes``.

    Attributes:
        report: the report of the round; it names the clients that are lost.
        nodes: the sampled nodes.
        grid: the nodes.
        timeout: seconds to wait for the answers to a query.
        equal: whether all weights are 1; else a client's weight is its number of
            examples.
        present: the clients that have sent their shares: those that train.
        threshold: t; 0 before the keys.
        whole: whether all must have answered: exchanges of this round have told sums of
            all.
        revealing: whether clients were asked for shares: from then on the sum may be
            known.
    """

    report: RoundReport
    nodes: Sequence[Node]
    grid: Grid
    timeout: float
    equal: bool
    present: frozenset[int] = frozenset()
    threshold: int = 0
    whole: bool = False
    revealing: bool = False
    _keys: dict[int, PublicKeys] = field(default_factory=dict)
    # by receiver, then by sender
    _encrypted: dict[int, dict[int, bytes]] = field(default_factory=dict)

    def prepare(self, asked: Sequence[int], share: float) -> bool:
        """Exchange keys and shares; return whether enough clients are left.

        Args:
            asked: the clients to ask.
            share: ``masked-threshold``.

        Raises:
            ClientPartError: no client has the mod.
        """
        # Of those that were asked: clients that are lost lower no threshold.
        self.threshold = max(math.ceil(share * len(asked)), len(asked) // 2 + 1, 2)
        self._keys = self._ask("keys", {number: {} for number in asked}, _keys)
        left: Collection[int] = self._keys
        if len(left) >= self.threshold:
            left = self.present = self._exchange_shares()
        if len(left) < self.threshold:
            self.give_up(
                f"{len(left)} of {len(self.nodes)} clients are left for the masks of"
                " the round"
            )
            return False
        return True

    def _exchange_shares(self) -> frozenset[int]:
        """Send each client the keys of all; keep the encrypted shares, and return who
        has sent them.
        """
        numbers = sorted(self._keys)
        keys = [key for number in numbers for key in self._keys[number]]
        common: dict[str, Any] = {
            MASK_NUMBERS: numbers,
            MASK_KEYS: keys,
            MASK_THRESHOLD: self.threshold,
        }
        configs = {number: {**common, MASK_NUMBER: number} for number in numbers}
        senders = []
        for number, shares in self._ask("shares", configs, _by_number).items():
            if shares.keys() != {*numbers} - {number}:
                self.lose(
                    number,
                    "it has sent shares for others than the clients of the round",
                )
                continue
            senders.append(number)
            for receiver, encrypted in shares.items():
                self._encrypted.setdefault(receiver, {})[number] = encrypted
        return frozenset(senders)

    def others(self, number: int) -> list[int]:
        """Return the present clients but this one."""
        return sorted(self.present - {number})

    def left_over(self, answered: frozenset[int], size: int) -> Array:
        """Return the masks that remain in the sum of these clients' vectors, whose size
        is given.

        Raises:
            MaskingError: too few clients are in it, or fewer than t shares of a secret
                have come; or a client was lost after a synchronised step, and the
                difference to the exchanges could be its gradient.
        """
        if self.whole and answered != self.present:
            raise MaskingError(
                f"{len(self.present - answered)} client(s) were lost after the"
                " synchronised step"
            )
        if len(answered) < self.threshold:
            raise MaskingError(
                f"{len(answered)} clients have answered, {self.threshold} needed"
            )
        shares, server_round = self._reveal(answered), self.report.server_round
        told = about(self.weight(self.present), self.equal)
        left = np.zeros(size, np.int64)
        for number in sorted(self.present):
            of_secret = shares[number][: self.threshold]
            if len(of_secret) < self.threshold:
                raise MaskingError(
                    f"{len(of_secret)} shares for {self.nodes[number]} have come,"
                    f" {self.threshold} needed"
                )
            if number in answered:
                left += seed_mask(recovered_seed(of_secret), server_round, size)
                continue
            secret = recovered_key(of_secret, self._keys[number].masks)
            for other in sorted(answered):
                add_pair_mask(
                    left,
                    other,
                    number,
                    secret,
                    self._keys[other].masks,
                    server_round,
                    told,
                )
        return left

    def _reveal(self, answered: frozenset[int]) -> Mapping[int, Sequence[bytes]]:
        """Ask for the shares of those who have answered and of those who are lost;
        return them by owner.
        """
        common: dict[str, Any] = {
            MASK_ANSWERED: sorted(answered),
            MASK_LOST: sorted(self.present - answered),
        }
        configs: dict[int, Mapping[str, Any]] = {}
        for number in answered:
            others = self.others(number)
            encrypted = [self._encrypted[number][other] for other in others]
            configs[number] = {**common, MASK_NUMBERS: others, MASK_SHARES: encrypted}

        self.revealing = True
        shares: dict[int, list[bytes]] = {owner: [] for owner in self.present}
        for of_client in self._ask("reveal", configs, _by_number).values():
            for owner in self.present & of_client.keys():
                shares[owner].append(of_client[owner])
        return shares

    @property
    def point(self) -> FixedPoint:
        """The fixed-point numbers of the sum."""
        return FixedPoint(self.weight(self.present))

    def config(self, number: int) -> dict[str, Any]:
        """Return what a client is told of the sum."""
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
        """Return the masked vectors by the number of the client."""
        number_of = {node.node_id: number for number, node in enumerate(self.nodes)}
        return {number_of[reply.node.node_id]: reply.state[MASKED] for reply in replies}

    def mean(self, vectors: Mapping[int, Array]) -> Array:
        """Return the weighted mean of what these clients have masked, without the masks
        that are left in the sum.

        Raises:
            MaskingError: the masks cannot be removed.
            ReplyError: the sum is out of range.
        """
        answered, total = frozenset(vectors), _sum(list(vectors.values()))
        return self.point.mean(
            total - self.left_over(answered, total.size), self.weight(answered)
        )

    def of_exchange(self, tag: str, tensors: Sequence[Tensor]) -> Array:
        """Return the sum of an exchange's tensors, int64, in which all masks cancel.

        Raises:
            ReplyError: a client's tensor is missing, or has no masks.
        """
        if len(tensors) < len(self.present) or any(
            tensor.dtype != torch.int64 for tensor in tensors
        ):
            raise ReplyError(
                f"exchange '{tag}' needs a masked tensor of int64 from each client"
            )
        return _sum([tensor.numpy() for tensor in tensors])

    def lose(self, number: int, why: str) -> None:
        """Report that a client takes no part any more."""
        node = self.nodes[number]
        self.report.reject(node.node_id, f"{node}: {why}")
        logger.warning("round %d: %s: %s", self.report.server_round, node, why)

    def give_up(self, why: str) -> None:
        """Report that the round ends without a result."""
        server_round = self.report.server_round
        logger.warning("round %d: %s: nothing is revealed", server_round, why)
        for node in self.nodes:
            if node.node_id not in self.report.rejected:
                self.report.reject(node.node_id, f"{node}: {why}: nothing is revealed")

    def _ask(
        self,
        stage: str,
        configs: Mapping[int, Mapping[str, Any]],
        read: Callable[[Mapping[str, Any]], Read],
    ) -> dict[int, Read]:
        """Send the query of a stage; return the answers by number, and name the clients
        without one.

        Raises:
            ClientPartError: all clients have answered without the mod.
        """
        number_of = {self.nodes[number].node_id: number for number in configs}
        queries = [
            self._query(stage, number, config) for number, config in configs.items()
        ]
        self.report.train.exchanges += 1
        answers = Answers[Read]()
        for reply in self.grid.send_and_receive(queries, timeout=self.timeout):
            answers.add(number_of[reply.metadata.src_node_id], reply, read)
        if configs and list(answers.faults.values()) == [_LACKS_MOD] * len(configs):
            raise ClientPartError(f"{self.nodes[next(iter(configs))]}: {_LACKS_MOD}")
        for number in sorted(configs.keys() - answers.read.keys()):
            why = answers.faults.get(number, f"no answer to '{stage}' of the masks")
            if stage == "reveal":  # it is not lost: its vector is in the sum
                logger.warning(
                    "round %d: %s: %s",
                    self.report.server_round,
                    self.nodes[number],
                    why,
                )
            else:
                self.lose(number, why)
        return answers.read

    def _query(self, stage: str, number: int, config: Mapping[str, Any]) -> Message:
        common: dict[str, Any] = {
            MASK_STAGE: stage,
            SERVER_ROUND: self.report.server_round,
        }
        content = RecordDict(
            {_QUERY: ConfigRecord({**common, **without_empty(config)})}
        )
        return Message(content, self.nodes[number].node_id, MessageType.QUERY)


def _sum(vectors: Sequence[Array]) -> Array:
    """Return the sum in the ring: int64, which wraps around."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total


def _keys(answer: Mapping[str, Any]) -> PublicKeys:
    masks, channel = answer[MASK_KEYS]
    return PublicKeys(_bytes(masks), _bytes(channel))


def _by_number(answer: Mapping[str, Any]) -> dict[int, bytes]:
    return dict(
        zip(
            answer.get(MASK_NUMBERS, ()),
            map(_bytes, answer.get(MASK_SHARES, ())),
            strict=True,
        )
    )


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} in place of bytes")
    return value

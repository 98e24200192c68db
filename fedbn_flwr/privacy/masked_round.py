"""The server's half of a round of masked sums: the three queries, who is left, the weights, and the mean.

``privacy.masks`` has the algorithm, ``client.masking`` the clients' answers.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.errors import ClientPartError, MaskingError, ReplyError
from fedbn_flwr.messages.kinds import of_kind
from fedbn_flwr.messages.protocol import (
    MASK_ANSWERED,
    MASK_EQUAL,
    MASK_KEYS,
    MASK_LOST,
    MASK_NUMBER,
    MASK_NUMBERS,
    MASK_PRESENT,
    MASK_RANGE,
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
from fedbn_flwr.privacy.masked_values import about
from fedbn_flwr.privacy.masks import PublicKeys, add_pair_mask, recovered_key, recovered_seed, seed_mask
from fedbn_flwr.privacy.ring import FixedPoint
from fedbn_flwr.server.failures import error_text
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.report import RoundReport
from fedbn_flwr.transport.polling_grid import polling

__all__ = ["MaskedRound"]

logger = logging.getLogger("flwr")

_QUERY = "config"  # the record of a query
_LACKS_MOD = (
    "its app does not answer the queries of masked sums. Make `masked_update` of fedbn_flwr.mods the app's first mod."
)
Read = TypeVar("Read")


@dataclass
class MaskedRound:
    """The masks of a round and its sums. A client's number is the position of its node in ``nodes``.

    Attributes:
        report: the report of the round; it names the clients that are lost.
        nodes: the sampled nodes.
        grid: the nodes.
        timeout: seconds to wait for the answers to a query.
        value_range: R, ``masked-range``.
        equal: whether all weights are 1; else a client's weight is its number of examples.
        present: the clients that have sent their shares: those that train.
        threshold: t; 0 before the keys.
        whole: whether all must have answered: exchanges of this round have told sums of all.
        revealing: whether clients were asked for shares: from then on the sum may be known.
    """

    report: RoundReport
    nodes: Sequence[Node]
    grid: Grid
    timeout: float
    value_range: float
    equal: bool
    present: frozenset[int] = frozenset()
    threshold: int = 0
    whole: bool = False
    revealing: bool = False
    _keys: dict[int, PublicKeys] = field(default_factory=dict)
    _neighbours: dict[int, frozenset[int]] = field(default_factory=dict)
    _encrypted: dict[int, dict[int, bytes]] = field(default_factory=dict)  # by receiver, then by sender

    def prepare(self, asked: Sequence[int], share: float, neighbours: int) -> bool:
        """Exchange keys and shares; return whether enough clients are left in each neighbourhood.

        Args:
            asked: the clients to ask.
            share: ``masked-threshold``.
            neighbours: ``masked-neighbours``.

        Raises:
            ClientPartError: no client has the mod.
            ConfigError: R is too large for the weights.
        """
        self._keys = self._ask("keys", {number: {} for number in asked}, lambda answer: _keys(answer[MASK_KEYS]))
        half = ((neighbours or len(asked)) + 1) // 2
        self._neighbours = _ring(list(self._keys), half)
        around = min(2 * half + 1, len(asked))  # those that were asked: lost ones lower no threshold
        self.threshold = max(math.ceil(share * around), around // 2 + 1, 2)
        left: Collection[int] = self._keys
        if len(left) >= self.threshold:
            left = self._exchange_shares()
        if not self.enough(self.present):
            self.give_up(f"{len(left)} of {len(self.nodes)} clients are left for the masks of the round")
            return False
        _ = self.point  # or it raises
        return True

    def partners(self, number: int) -> list[int]:
        """Return the present neighbours of a client."""
        return sorted(self._neighbours[number] & self.present)

    def enough(self, numbers: frozenset[int]) -> bool:
        """Return whether each of these clients has t of them in its neighbourhood, and all are connected.

        Parts that are not connected would have sums of their own.
        """
        if not numbers or any(len(self._around(i) & numbers) < self.threshold for i in numbers):
            return False
        reached, new = set[int](), {min(numbers)}
        while new:
            reached |= new
            new = set[int]().union(*(self._around(i) & numbers for i in new)) - reached
        return reached == numbers

    def left_over(self, answered: frozenset[int], size: int) -> Array:
        """Return the masks that remain in the sum of these clients' vectors, whose size is given.

        Raises:
            MaskingError: too few clients are in it, or fewer than t shares of a secret have come; or a client was lost
                after a synchronised step, and the difference to the exchanges could be its gradient.
        """
        if self.whole and answered != self.present:
            raise MaskingError(f"{len(self.present - answered)} client(s) were lost after the synchronised step")
        if not self.enough(answered):
            raise MaskingError(f"{len(answered)} clients have answered, {self.threshold} needed in each part")
        shares, server_round = self._reveal(answered), self.report.server_round
        told = about(self.value_range, self.weight(self.present), self.equal)
        left = np.zeros(size, np.int64)
        for number in sorted(self.present):
            partners = [other for other in self.partners(number) if other in answered]
            if number not in answered and not partners:
                continue
            of_secret = shares[number]
            if len(of_secret) < self.threshold:
                raise MaskingError(
                    f"{len(of_secret)} shares for {self.nodes[number]} have come, {self.threshold} needed"
                )
            if number in answered:
                left += seed_mask(recovered_seed(of_secret[: self.threshold]), server_round, size)
                continue
            secret = recovered_key(of_secret[: self.threshold], self._keys[number].masks)
            for other in partners:
                add_pair_mask(left, other, number, secret, self._keys[other].masks, server_round, told)
        return left

    @property
    def point(self) -> FixedPoint:
        """The fixed-point numbers of the sum."""
        return FixedPoint(self.value_range, self.weight(self.present))

    def config(self, number: int) -> dict[str, Any]:
        """Return what a client is told of the sum."""
        total = self.weight(self.present)
        entries: dict[str, Any] = {MASK_TOTAL: total, MASK_RANGE: self.value_range, MASK_EQUAL: self.equal}
        return entries | {MASK_PRESENT: self.partners(number), MASK_WEIGHT: self.weight({number})}

    def weight(self, numbers: Collection[int]) -> float:
        """Return the sum of these clients' weights."""
        if self.equal:
            return float(len(numbers))
        return float(sum(self.nodes[number].num_examples or 0 for number in numbers))

    def by_number(self, replies: Sequence[tuple[Node, State]]) -> dict[int, Array]:
        """Return the masked vectors by the number of the client."""
        number_of = {node.node_id: number for number, node in enumerate(self.nodes)}
        return {number_of[node.node_id]: state[MASKED] for node, state in replies}

    def mean(self, vectors: Mapping[int, Array]) -> Array:
        """Return the weighted mean of what these clients have masked, without the masks that are left in the sum.

        Raises:
            MaskingError: the masks cannot be removed.
            ReplyError: the sum is out of range.
        """
        answered, total = frozenset(vectors), _sum(list(vectors.values()))
        return self.point.mean(total - self.left_over(answered, total.size), self.weight(answered))

    def of_exchange(self, tag: str, tensors: Sequence[Tensor]) -> Array:
        """Return the sum of an exchange's tensors, int64, in which all masks cancel.

        Raises:
            ReplyError: a client's tensor is missing, or has no masks.
        """
        if len(tensors) < len(self.present) or any(tensor.dtype != torch.int64 for tensor in tensors):
            raise ReplyError(f"exchange '{tag}' needs a masked tensor of int64 from each client")
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

    def _around(self, number: int) -> frozenset[int]:
        return (self._neighbours[number] | {number}) & self.present

    def _exchange_shares(self) -> frozenset[int]:
        """Send each client its neighbours' keys; keep the encrypted shares, and return who has sent them."""
        configs: dict[int, Mapping[str, Any]] = {}
        for number, neighbours in self._neighbours.items():
            listed = sorted({number, *neighbours})
            configs[number] = {
                MASK_NUMBER: number,
                MASK_NUMBERS: listed,
                MASK_KEYS: [key for other in listed for key in self._keys[other]],
                MASK_THRESHOLD: self.threshold,
            }
        senders = []
        for number, shares in self._ask("shares", configs, _by_number).items():
            if shares.keys() != self._neighbours[number]:
                self.lose(number, "it has sent shares for others than its neighbours")
                continue
            senders.append(number)
            for other, encrypted in shares.items():
                self._encrypted.setdefault(other, {})[number] = encrypted
        self.present = frozenset(senders)
        return self.present

    def _reveal(self, answered: frozenset[int]) -> Mapping[int, Sequence[bytes]]:
        """Ask for the shares of those who have answered and of those who are lost; return them by owner."""
        configs: dict[int, Mapping[str, Any]] = {}
        for number in answered:
            around, others = self._around(number), self.partners(number)
            configs[number] = {
                MASK_ANSWERED: sorted(around & answered),
                MASK_LOST: sorted(around - answered),
                MASK_NUMBERS: others,
                MASK_SHARES: [self._encrypted[number][other] for other in others],
            }

        def shares(answers: Mapping[int, Mapping[int, bytes]]) -> dict[int, list[bytes]]:
            of_secrets: dict[int, list[bytes]] = {number: [] for number in self.present}
            for number, revealed in answers.items():
                for owner in self._around(number) & revealed.keys():
                    of_secrets[owner].append(revealed[owner])
            return of_secrets

        def enough(answers: Mapping[int, Mapping[int, bytes]]) -> bool:
            return all(len(of_secret) >= self.threshold for of_secret in shares(answers).values())

        self.revealing = True
        return shares(self._ask("reveal", configs, _by_number, enough))

    def _ask(
        self,
        stage: str,
        configs: Mapping[int, Mapping[str, Any]],
        read: Callable[[Mapping[str, Any]], Read],
        enough: Callable[[Mapping[int, Read]], bool] = lambda answers: False,
    ) -> dict[int, Read]:
        """Send the query of a stage; return the answers by number, and name the clients without one.

        Later answers than are ``enough`` are not waited for.

        Raises:
            ClientPartError: all clients have answered without the mod.
        """
        common: dict[str, Any] = {MASK_STAGE: stage, SERVER_ROUND: self.report.server_round}
        self.report.train.exchanges += 1
        messages = []
        for number, config in configs.items():
            content = RecordDict({_QUERY: ConfigRecord({**common, **without_empty(config)})})
            messages.append(Message(content, self.nodes[number].node_id, MessageType.QUERY))
        number_of = {self.nodes[number].node_id: number for number in configs}

        def read_all(replies: Iterable[Message]) -> tuple[dict[int, Read], dict[int, str]]:
            """Return the answers, and why there is none, by number."""
            answers, why = dict[int, Read](), dict[int, str]()
            for reply in replies:
                number = number_of[reply.metadata.src_node_id]
                if reply.has_error():
                    why[number] = error_text(reply)
                elif MASK_REPLY not in of_kind(reply.content, ConfigRecord):
                    why[number] = _LACKS_MOD
                else:
                    try:
                        answers[number] = read(of_kind(reply.content, ConfigRecord)[MASK_REPLY])
                    except (KeyError, TypeError, ValueError) as error:  # from outside
                        text = f"{type(error).__name__}: {error}"
                        why[number] = f"its answer to '{stage}' of the masks cannot be read: {text}"
            return answers, why

        replies = polling(self.grid).send_and_receive_until(
            messages, lambda replies: enough(read_all(replies)[0]), timeout=self.timeout
        )
        answers, why = read_all(replies)
        complete = enough(answers)
        for number in [number for number in configs if number not in answers]:
            text = why.get(number, f"no answer to '{stage}' of the masks")
            if stage != "reveal":
                self.lose(number, text)
            elif number in why or not complete:  # its vector is in the sum
                logger.warning("round %d: %s: %s", self.report.server_round, self.nodes[number], text)
        if configs and list(why.values()).count(_LACKS_MOD) == len(configs):
            raise ClientPartError(f"{self.nodes[next(iter(configs))]}: {_LACKS_MOD}")
        return answers


def _sum(vectors: Sequence[Array]) -> Array:
    """Return the sum in the ring: int64, which wraps around."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total


def _ring(numbers: Sequence[int], half: int) -> dict[int, frozenset[int]]:
    """Return each client's neighbours: those up to ``half`` places before and after it in a random order."""
    ring, size = list(numbers), len(numbers)
    secrets.SystemRandom().shuffle(ring)
    steps = range(-half, half + 1) if 2 * half < size else range(size)
    neighbours = {}
    for place, number in enumerate(ring):
        around = {ring[(place + step) % size] for step in steps}
        neighbours[number] = frozenset(around - {number})
    return neighbours


def _keys(keys: Sequence[bytes]) -> PublicKeys:
    masks, channel = map(_bytes, keys)
    return PublicKeys(masks, channel)


def _by_number(answer: Mapping[str, Any]) -> dict[int, bytes]:
    return dict(zip(answer.get(MASK_NUMBERS, ()), map(_bytes, answer.get(MASK_SHARES, ())), strict=True))


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} in place of bytes")
    return value

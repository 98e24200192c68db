"""A barrier that reduces the tensors of all clients to one common answer.

In one process, the clients' own threads wait here. For members behind the gRPC channel
and in worker processes, no thread waits; the answer is sent to them. A member that
leaves, stalls or sends an unusable tensor is dropped. The others repeat the step, so it
stays exact.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedbn_flwr.batchnorm.sync import combine, exchange_bytes, refuse_unusable
from fedbn_flwr.errors import TOO_FEW_LEFT, ReplyError, coded, split_code
from fedbn_flwr.transport.through_user_code import Dropped, Reducer, RetryStep
from fedbn_flwr.transport.turns import Wait

__all__ = [
    "LOOK",
    "Barrier",
    "BarrierGrid",
    "Member",
    "Outcome",
    "TaggedTensor",
    "Then",
    "odd_ones",
]

TaggedTensor = tuple[str, Tensor]  # the tag of an exchange and a client's tensor
Outcome = Tensor | Dropped | RetryStep
"""The outcome of an exchange for a member: an answer, or an exception of ``reduce``."""

Then = Callable[[Mapping[int, Outcome]], None]
"""A function ``then(outcomes)`` that receives outcomes by node id."""

LOOK = 1.0  # seconds between two checks of the clock while somebody waits


@dataclass(frozen=True)
class Member:
    """A client of the round.

    Attributes:
        weight: |D_i|, the number of its examples.
        batch_size: b_i, the number of examples in its first batch.
        name: name of the client in error messages.
    """

    weight: float
    batch_size: int
    name: str


@dataclass
class _Exchange:
    """One exchange of one attempt."""

    attempt: int
    deadline: float = 0.0  # 0 means that no member has sent yet
    sent: dict[int, TaggedTensor] = field(default_factory=dict)
    answer: Tensor | None = None
    over: bool = False  # answered or aborted
    # functions to call at the end, with the members that wait for each
    then: dict[Then, list[int]] = field(default_factory=dict)


class Barrier:
    """The thread-safe barrier of one round.

    Args:
        members: the members by node id, in the order of sums.
        timeout: seconds that an exchange waits for its last member after its first.
        min_members: smallest number of members. With fewer, the step is given up.
        in_turns: whether members may compute one after another, as they do in one
            process. Then a member is not late while another one computes: the timeout
            restarts when a member begins or sends.

    Attributes:
        members: as given.
        timeout: as given.
        dropped: the reason for dropping each dropped member, by node id.
        never_began: reasons of the members that did not begin the step in time.
        exchanges: number of answered exchanges in all attempts.
        bytes_down: bytes of the answers; each broadcast counts once.
        bytes_up: bytes of the members' tensors.
        apart_down: bytes of additional columns of the answers; each broadcast counts
            once.
        apart_up: bytes of additional columns of the members' tensors.
    """

    def __init__(
        self,
        members: Mapping[int, Member],
        timeout: float,
        min_members: int = 1,
        *,
        in_turns: bool = False,
    ) -> None:
        self.members = dict(members)
        self._in_turns = in_turns
        self.timeout = timeout
        self._min_members = min_members
        # The lock guards everything below. Answers are given outside of it, see
        # ``_locked``, because their receiver may call the barrier again immediately, in
        # the same thread.
        self._lock = threading.Lock()
        self._exchange = _Exchange(0)
        # Exchanges that have ended since the lock was taken.
        self._ended: list[_Exchange] = []
        self._begun: set[int] = set()
        self._closed: set[int] = set()
        self._latest_attempt = 0  # latest attempt that a member has begun
        self._looked = 0.0  # last check of the clock
        self._dropped_in: dict[int, int] = {}
        self.dropped: dict[int, str] = {}
        self.never_began: list[str] = []
        self.exchanges = self.bytes_down = self.bytes_up = self.apart_down = (
            self.apart_up
        ) = 0

    def reducer(self, node_id: int) -> Reducer:
        """Return the reducer of a member."""
        return _MemberReducer(self, node_id)

    def begin(self, node_id: int) -> tuple[int, int]:
        """Return the attempt and the number of examples in the remaining batches."""
        with self._locked():
            self._refuse_dropped(node_id)
            self._begun.add(node_id)
            self._latest_attempt = self._exchange.attempt
            if self._in_turns and self._exchange.deadline:
                self._set_deadline(self._exchange)
            union = sum(self.members[i].batch_size for i in self._remaining())
            return self._exchange.attempt, union

    def reduce(self, node_id: int, attempt: int, tag: str, tensor: Tensor) -> Tensor:
        """Return the answer when all members have sent their tensors.

        See ``Reducer.reduce``.
        """
        wait = None
        with self._locked():
            exchange = self._take(node_id, attempt, tag, tensor)
            # The last member to send continues immediately and keeps its turn. For the
            # others, create the wait under the lock, so that they cannot miss the end.
            if not exchange.over:
                wait = Wait()
                end = wait.end
                exchange.then[lambda _: end()] = [node_id]
        # Wait until the exchange is over, and drop the members that are late.
        if wait:
            with wait:
                while not wait.is_over(LOOK):
                    self.drop_late()
        outcome = self._outcome(node_id, exchange)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def send(
        self, node_id: int, attempt: int, tag: str, tensor: Tensor, then: Then
    ) -> None:
        """Do an exchange like ``reduce``, but do not wait for its end.

        At the end, ``then`` is called in some thread, once for all members with the
        same ``then``. Call ``drop_late`` every second meanwhile.
        """
        try:
            with self._locked():
                exchange = self._take(node_id, attempt, tag, tensor)
                exchange.then.setdefault(then, []).append(node_id)
        except (Dropped, RetryStep) as error:
            then({node_id: error})

    def drop_late(self) -> None:
        """Drop the members that have not sent in time."""
        with self._locked():
            now, exchange = time.monotonic(), self._exchange
            # Nobody has sent a tensor yet, so nobody waits.
            if not exchange.deadline:
                self._looked = now
                return
            # If this process was paused, extend the deadline by the pause.
            exchange.deadline += max(0.0, now - self._looked - LOOK)
            self._looked = now
            if now < exchange.deadline:
                return

            reasons = {}
            for i in self._remaining():
                if i in exchange.sent or i in self._closed:
                    continue
                reasons[i] = self._reason_late(i, exchange)
                # If no member has sent a tensor, ``_drop`` has set this deadline for
                # the end of the step, so the member may have begun.
                if i not in self._begun and exchange.sent:
                    self.never_began.append(reasons[i])
            if reasons:
                self._drop(reasons)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock in the block, then answer exchanges that ended in the block."""
        self._lock.acquire()
        try:
            yield
        finally:
            ended, self._ended = self._ended, []
            self._lock.release()
            # Give the answers even after an exception. The call of a dropped member
            # raises an exception, but the other members must learn that the exchange
            # was aborted.
            for exchange in ended:
                for then, waiting in exchange.then.items():
                    then({i: self._outcome(i, exchange) for i in waiting})

    def _take(self, node_id: int, attempt: int, tag: str, tensor: Tensor) -> _Exchange:
        """Take a member's tensor and return its exchange.

        Raises:
            RetryStep: the tensor belongs to an earlier attempt.
            Dropped: the member is out of the round.
        """
        # Refuse a tensor from a member that would get no answer. A dropped member is
        # out of the round. A member that has closed has ended its step, and the others
        # no longer wait.
        self._refuse_dropped(node_id)
        if node_id in self._closed:
            raise Dropped(
                f"{self.members[node_id].name} sent exchange '{tag}' after the end of"
                " its step"
            )
        exchange = self._exchange
        if attempt != exchange.attempt:
            raise RetryStep(
                f"attempt {attempt} is over; attempt {exchange.attempt} has begun"
            )

        # Drop a client that diverges. It loses its own round, but must not spoil the
        # round of the others.
        try:
            refuse_unusable(tag, tensor)
        except ReplyError as error:
            self._drop({node_id: error.reason})
            self._refuse_dropped(node_id)

        # The last member to send answers all members.
        exchange.sent[node_id] = (tag, tensor)
        if self._in_turns or not exchange.deadline:
            self._set_deadline(exchange)
        size, apart = exchange_bytes(tag, tensor)
        self.bytes_up += size
        self.apart_up += apart
        self._answer_if_complete()
        return exchange

    def _set_deadline(self, exchange: _Exchange) -> None:
        self._looked = time.monotonic()
        exchange.deadline = self._looked + self.timeout

    def _outcome(self, node_id: int, exchange: _Exchange) -> Outcome:
        """Return the outcome for a member of an exchange that is over."""
        if exchange.answer is not None:
            return exchange.answer
        # The exchange was aborted, because this member or another member was lost.
        try:
            with self._lock:
                self._refuse_dropped(node_id)
        except Dropped as error:
            return error
        return RetryStep("a client was lost during the step")

    def close(self, node_id: int) -> None:
        """Mark a member as finished with its exchanges."""
        with self._locked():
            self._closed.add(node_id)
            self._answer_if_complete()

    def leave(self, node_id: int, reason: str) -> None:
        """Drop a member that has left without closing its reducer."""
        with self._locked():
            if node_id in self._remaining() and node_id not in self._closed:
                self._drop({node_id: reason})

    def finished_with(self) -> list[int]:
        """Return the members whose batches are in the step if it is finished.

        A member that was lost after its last exchange is included, because the others
        have all their answers and repeat nothing.
        """
        if not self._closed - self.dropped.keys():
            return []
        last = self._latest_attempt
        begun = (i for i in self.members if i in self._begun)
        return [i for i in begun if self._dropped_in.get(i, last) >= last]

    def _remaining(self) -> list[int]:
        return [node_id for node_id in self.members if node_id not in self.dropped]

    def _refuse_dropped(self, node_id: int) -> None:
        """Raise Dropped for a dropped member, or if too few members are left."""
        if node_id not in self.members:
            raise Dropped(f"node {node_id} is not a member of this round")
        if node_id in self.dropped:
            code, reason = split_code(self.dropped[node_id])
            text = (
                f"{self.members[node_id].name} was dropped from the synchronised step:"
                f" it {reason}"
            )
            raise Dropped(coded(code, text) if code else text)
        left = len(self._remaining())
        if left < self._min_members:
            text = (
                f"the synchronised step has {left} of its clients left, fewer than the"
                f" required {self._min_members}"
            )
            raise Dropped(coded(TOO_FEW_LEFT, text))

    def _reason_late(self, node_id: int, exchange: _Exchange) -> str:
        """Return the reason for dropping a member that did not send in time."""
        if not exchange.sent:
            return (
                f"did not end its work within {self.timeout:g} s after too few clients"
                " were left for the step"
            )
        if node_id in self._begun:
            tag, _ = next(iter(exchange.sent.values()))
            return f"did not send exchange '{tag}' within {self.timeout:g} s"
        if self._in_turns:
            return (
                f"did not begin the step within {self.timeout:g} s of the client"
                " before it"
            )
        return (
            f"did not begin the step within {self.timeout:g} s of the first. All"
            " clients of a round must run at the same time. In simulation, add"
            " --federation-config 'client-resources-num-cpus=1"
            f" init-args-num-cpus={len(self.members)}'"
        )

    def _drop(self, reasons: Mapping[int, str]) -> None:
        """Drop members and abort the exchange, so that the others repeat the step."""
        aborted = self._exchange
        self.dropped.update(reasons)
        self._dropped_in.update(dict.fromkeys(reasons, aborted.attempt))
        self._exchange = _Exchange(aborted.attempt + 1)
        # If too few members are left, nobody sends any more. Set the deadline here,
        # because a member may hang.
        if len(self._remaining()) < self._min_members:
            self._set_deadline(self._exchange)
        self._end(aborted)

    def _answer_if_complete(self) -> None:
        """Answer the exchange if every remaining member has sent."""
        exchange, left = self._exchange, self._remaining()
        if not exchange.sent:
            return
        for i in left:
            if i not in exchange.sent and i not in self._closed:
                return

        # All members must be at the same place in the step. A member that has sent no
        # tensor has closed.
        odd = odd_ones({i: exchange.sent.get(i) for i in left})
        if odd:
            self._drop(odd)
            return

        # Combine in the order of the members, so that the bits of the sum do not depend
        # on the order of arrival.
        tag, _ = exchange.sent[left[0]]
        tensors = [exchange.sent[i][1] for i in left]
        weights = [self.members[i].weight for i in left]
        try:
            exchange.answer = combine(tag, tensors, weights)
        # A later attempt may succeed. Drop the last sender, so that no call hangs.
        except Exception as error:
            last = next(reversed(exchange.sent))
            reason = f"completed exchange '{tag}', whose answer failed: {error}"
            self._drop({last: reason})
            return

        # Begin the next exchange before the members receive the answer of this
        # exchange.
        self.exchanges += 1
        size, apart = exchange_bytes(tag, exchange.answer)
        self.bytes_down += size
        self.apart_down += apart
        self._exchange = _Exchange(exchange.attempt)
        self._end(exchange)

    def _end(self, exchange: _Exchange) -> None:
        """End an exchange. ``_locked`` then notifies its waiting members."""
        exchange.over = True
        self._ended.append(exchange)


def odd_ones(sent: Mapping[int, TaggedTensor | None]) -> dict[int, str]:
    """Return a reason to drop each client that differs from the majority.

    If two groups have the same size, the first is the majority.

    Args:
        sent: tensors sent by the clients, in the order of the members. None means that
            the client has finished the step.
    """
    if not sent:
        return {}
    kinds = {node_id: _kind(tensor) for node_id, tensor in sent.items()}
    # If counts are equal, this is the kind that occurs first.
    usual, _ = Counter(kinds.values()).most_common(1)[0]
    return {i: _difference(kind, usual) for i, kind in kinds.items() if kind != usual}


_Kind = tuple[str, tuple[int, ...], torch.dtype]


def _kind(sent: TaggedTensor | None) -> _Kind | None:
    """Return the properties that must be equal for all clients of an exchange."""
    if sent is None:
        return None
    tag, tensor = sent
    return tag, tuple(tensor.shape), tensor.dtype


def _difference(kind: _Kind | None, usual: _Kind | None) -> str:
    own, others = _place(kind), _place(usual)
    if own == others:
        return f"sent {kind}, but the others sent {usual}"
    return (
        f"{own}, but the others {others}. In the first local step, every client must"
        " call the same BatchNorm layers in the same order. A layer that is skipped at"
        " random (stochastic depth) or for some inputs cannot be synchronised. Do not"
        " skip layers in this step, or use a method without a synchronised step, such"
        " as fedavg or fedbn"
    )


def _place(kind: _Kind | None) -> str:
    """Return the place of a client in its step."""
    if kind is None:
        return "had finished the step"
    name, _, call = kind[0].partition("/")
    number, _, path = call.partition("/")
    if path:
        layer = f"BatchNorm layer {path!r}"
    else:
        layer = f"the functional batch_norm of call {number}"
    if name == "gradients":
        return f"was in the backward pass, at {layer}"
    return f"called {layer}"


@runtime_checkable
class BarrierGrid(Protocol):
    """A grid whose clients run in this process and can wait at a barrier."""

    def open_barrier(self, barrier_id: str, barrier: Barrier) -> None:
        """Let the members run at the same time, and find the barrier by its id."""

    def close_barrier(self, barrier_id: str) -> None:
        """Remove the barrier."""


@dataclass
class _MemberReducer:
    """A member's reducer, for use in the member's own thread."""

    barrier: Barrier
    node_id: int
    attempt: int = 0

    def begin(self) -> int:
        self.attempt, union = self.barrier.begin(self.node_id)
        return union

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        return self.barrier.reduce(self.node_id, self.attempt, tag, tensor)

    def close(self) -> None:
        self.barrier.close(self.node_id)

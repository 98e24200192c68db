"""Every wait ends at its own limit, on a simulated clock.

A client that exceeds the limit of one phase costs no other client and no other phase.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import EngineError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FedAvg, FedTAN
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.transport import Barrier, Member
from fedbn_flwr.transport.polling_grid import PollingGrid
from fedbn_flwr.transport.step_by_barrier import play_step
from fedbn_flwr.transport.step_transport import Limits
from tests.support.fast import fast
from tests.support.federation import torch_clients

PAUSE = 0.25
"""The longest pause between two polls."""
NEVER = 1e9


class Clock:
    """A clock whose seconds pass only in pauses."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 1e-6  # a pause takes some time even if it is 0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


class Slow(PollingGrid):
    """A grid whose nodes connect, and whose replies arrive, after a delay."""

    def __init__(
        self,
        inner: InProcessGrid,
        clock: Clock,
        connects: Sequence[float],
        delay: Callable[[str, int, float], float],
    ) -> None:
        super().__init__(inner)
        self.clock, self.connects, self.delay = clock, connects, delay
        self.waits = []
        self._due = {}

    def get_node_ids(self) -> list[int]:
        nodes = zip(self.inner.get_node_ids(), self.connects, strict=True)
        return [node_id for node_id, seconds in nodes if seconds <= self.clock.now]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        delays = []
        for reply in self.inner.send_and_receive(messages):
            node = self.inner.get_node_ids().index(reply.metadata.src_node_id)
            kind = reply.metadata.message_type
            delays.append(self.delay(kind, node, self.clock.now))
            due = self.clock.now + delays[-1], reply
            self._due[reply.metadata.reply_to_message_id] = due
        self.waits.append((kind, self.clock.now, delays))
        return list(self._due)[-len(delays) :]

    def pull_messages(self, message_ids) -> list[Message]:
        here = [i for i in message_ids if self._due[i][0] <= self.clock.now]
        return [self._due.pop(i)[1] for i in here]


KINDS = ("query", "query.exchange", "train", "query.statistics", "evaluate")


def wait_of(kind: str, delays: Sequence[float], exchange: float, limit: float) -> float:
    """Return the seconds until the end of a wait for replies with these delays."""
    if kind == "query.exchange":
        limit = min(limit, min(delays) + exchange)
    elif kind == "train":
        limit = max(limit, exchange)
    return min(max(delays), limit)


@pytest.mark.parametrize("seed", fast(range(10), 0, 1, 9))
def test_a_phase_of_a_round_ends_at_its_own_limit(
    clock, points, mlp, seed: int
) -> None:
    draw = random.Random(seed)
    exchange, limit = draw.sample([4.0, 15.0, 60.0], 2)
    # Client 0 is quick. Each other client is slow in one kind of wait of round 1.
    slow = {i: draw.choice(KINDS) for i in range(1, 5)}
    share = {i: draw.choice([0.8, 1.2, 50.0]) for i in slow}
    connects = [draw.uniform(0, 0.9 * limit) for _ in range(5)]
    quick = {kind: draw.uniform(0.1, 0.5 * limit) for kind in KINDS}

    def delay(kind: str, node: int, _: float) -> float:
        if slow.get(node) != kind or len(strategy.reports) > 1:
            return quick[kind]
        return share[node] * wait_of(kind, [quick[kind], NEVER], exchange, limit)

    strategy = FedTAN(
        fedtan_timeout=exchange,
        eval_on="recalibrated,global",
        min_available_nodes=5,
    )
    settings = LocalTraining(learning_rate=LearningRate(0.1), local_steps=2)
    data = [points(6, i) for i in range(5)]
    with InProcessGrid(client_app(torch_clients(mlp, data, settings)), 5) as inner:
        grid = Slow(inner, clock, connects, delay)
        arrays = to_record(mlp().state_dict())
        strategy.start(grid, arrays, num_rounds=2, timeout=limit)
    waits = [*grid.waits, ("end", clock.now, [])]
    assert max(connects) <= waits[0][1] <= max(connects) + 0.1
    for (kind, begun, delays), (_, ended, _) in itertools.pairwise(waits):
        least = wait_of(kind, delays, exchange, limit)
        assert least - 1e-3 <= ended - begun <= least + 2 * PAUSE, kind
    late = {i: kind for i, kind in slow.items() if share[i] > 1}
    first, second = strategy.reports
    nodes = inner.get_node_ids()
    assert {nodes.index(node) for node in first.rejected} == {*late}
    absent = {i for i in late if late[i] in ("query", "query.exchange", "train")}
    assert {*first.participants} == {*range(5)} - absent
    untested = {str(i) for i in late if late[i] in ("query", "evaluate")}
    assert {*first.evaluations} == {*"01234"} - untested
    assert second.rejected == {}
    assert len(second.participants) == len(second.evaluations) == 5


def test_a_wait_for_nodes_and_a_step_at_a_barrier_end_at_their_limits(clock) -> None:
    arrays = to_record({"w": torch.ones(1)})
    with InProcessGrid(ClientApp(), 2) as inner:
        grid = Slow(inner, clock, [0.0, NEVER], lambda *_: NEVER)
        with pytest.raises(EngineError, match=r"^1 node.* connected after 7 s"):
            FedAvg(min_available_nodes=2).start(grid, arrays, num_rounds=1, timeout=7.0)
        assert 7 <= clock.now <= 7.2
        (node,) = grid.get_node_ids()
        barrier = Barrier({node: Member(1, 1, "a node")}, timeout=NEVER)
        messages, limits = [Message(RecordDict(), node, "train")], Limits(NEVER, 7, 1)
        assert not play_step(grid, messages, barrier, limits).replies
    assert 14 <= clock.now <= 14.4
    # The nodes of this process are known, so nobody waits for more.
    with (
        InProcessGrid(ClientApp(), 1) as grid,
        pytest.raises(EngineError, match=r"^1 node.* connected, fewer"),
    ):
        FedAvg().start(grid, arrays, num_rounds=1)

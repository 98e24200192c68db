"""The barrier reduces to exact sums, and no member waits forever."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from fedbn_flwr.errors import EngineError
from fedbn_flwr.transport import (
    Barrier,
    Dropped,
    RetryStep,
    in_process_reducer,
    use_reducer,
)


def row(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def ignored(outcomes) -> None:
    """Ignore the outcomes of an exchange."""


def test_sums_are_in_the_order_of_members_not_of_arrival(members, at_once) -> None:
    """In this order, 1e16 - 1e16 + 1 is 1. In the reverse order, it is 0."""
    for delays in ((0.0, 0.1, 0.2), (0.2, 0.1, 0.0)):
        barrier = Barrier(members(1, 1, 1), timeout=10)

        def arrive(i: int, delay: float, barrier: Barrier = barrier) -> torch.Tensor:
            time.sleep(delay)
            reducer = barrier.reducer(100 + i)
            reducer.begin()
            return reducer.reduce("gradients/0", row((3e16, -3e16, 3.0)[i]))

        answers = at_once(
            *(partial(arrive, i, delay) for i, delay in enumerate(delays))
        )
        assert answers == [row(1.0)] * 3


@pytest.fixture
def wait(monkeypatch) -> Callable[[Barrier, list[float]], None]:
    """Provide ``wait(barrier, [1, 2])`` to look for late members after 1 and 3 s."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def run(barrier: Barrier, pauses: list[float]) -> None:
        nonlocal now
        for pause in pauses:
            now += pause
            barrier.drop_late()

    return run


def test_late_members_are_dropped_and_the_others_retry_once(members, wait) -> None:
    """Outcomes for members with one ``then`` come together."""
    barrier, here = Barrier(members(1, 1, 2, 1, 1), timeout=5), [100, 101, 102]
    came = []
    then = {100: came.append, 101: came.append, 102: lambda own: came.append(own)}

    def send(node_id: int, attempt: int, tag: str) -> None:
        barrier.send(node_id, attempt, tag, row(node_id), then[node_id])

    for node_id in (*here, 103):
        assert barrier.begin(node_id) == (0, 2 + 3 + 4 + 5 + 6)
    for node_id in here:
        send(node_id, 0, "gradients/0")
    wait(barrier, [0])
    assert came == [], "nobody was late"
    wait(barrier, [1] * 5)
    kinds = [{node_id: type(one) for node_id, one in own.items()} for own in came]
    assert kinds == [{100: RetryStep, 101: RetryStep}, {102: RetryStep}]
    assert barrier.dropped[103] == "did not send exchange 'gradients/0' within 5 s"
    assert barrier.dropped[104].startswith("did not begin the step within 5 s")
    assert "init-args-num-cpus=5" in barrier.dropped[104]
    assert barrier.never_began == [barrier.dropped[104]]

    send(102, 0, "gradients/0")
    assert isinstance(came.pop()[102], RetryStep), "of the attempt that is over"
    came.clear()
    for node_id in here:
        assert barrier.begin(node_id) == (1, 2 + 3 + 4)
        send(node_id, 1, "gradients/0")
    mean = row((100 + 101 + 2 * 102) / 4)
    assert came == [{100: mean, 101: mean}, {102: mean}]
    late = "node 103 was dropped from the synchronised step: it did not send"
    with pytest.raises(Dropped, match=late):
        barrier.reducer(103).reduce("gradients/0", row(1))
    with pytest.raises(Dropped, match="node 104 was dropped"):
        barrier.reducer(104).begin()
    with pytest.raises(Dropped, match="node 7 is not a member"):
        barrier.reducer(7).begin()


def test_a_member_that_is_done_is_not_late_when_another_one_is(members, wait) -> None:
    barrier = Barrier(members(1, 1, 1), timeout=5)
    for node_id in barrier.members:
        barrier.begin(node_id)
    for node_id in barrier.members:
        barrier.send(node_id, 0, "gradients/0", row(1), ignored)
    barrier.close(100)
    late = {}
    barrier.send(100, 0, "mean/1", row(1), late.update)
    assert "sent exchange 'mean/1' after the end of its step" in str(late[100])
    # one exchange more than 100 had
    barrier.send(101, 0, "mean/1", row(1), ignored)
    wait(barrier, [1] * 6)
    assert list(barrier.dropped) == [102]
    assert 100 in barrier.finished_with()


def test_the_time_in_which_the_server_was_paused_does_not_count(members, wait) -> None:
    barrier = Barrier(members(1, 1), timeout=5)
    for node_id in (100, 101):
        barrier.begin(node_id)
    barrier.send(100, 0, "gradients/0", row(1), ignored)
    wait(barrier, [1, 100, 1, 1])
    assert barrier.dropped == {}
    wait(barrier, [1] * 3)
    assert barrier.dropped.keys() == {101}


@pytest.mark.parametrize("in_turns", [True, False])
def test_where_members_compute_in_turns_each_that_begins_has_the_whole_time(
    members, wait, in_turns: bool
) -> None:
    barrier = Barrier(members(1, 1, 1), timeout=5, in_turns=in_turns)
    barrier.begin(100)
    wait(barrier, [1] * 9)  # nobody waits for the first
    barrier.send(100, 0, "gradients/0", row(1), ignored)
    for node_id in (101, 102):
        wait(barrier, [1] * 3)
        if node_id not in barrier.dropped:
            barrier.begin(node_id)
    assert (barrier.dropped == {}) is in_turns
    if not in_turns:
        return
    # In later exchanges nobody begins: each that sends gives the whole time again.
    for place, node_id in enumerate((101, 102, 100, 101, 102)):
        wait(barrier, [1] * 3)
        barrier.send(node_id, 0, f"gradients/{int(place > 1)}", row(1), ignored)
    assert barrier.dropped == {}


def test_where_too_few_are_left_those_that_hang_are_not_waited_for(
    members, wait
) -> None:
    barrier = Barrier(members(1, 1, 1), timeout=5, min_members=3)
    for node_id in (100, 101, 102):
        barrier.begin(node_id)
    barrier.leave(100, "went away")
    wait(barrier, [0.1] * 100)
    assert barrier.dropped.keys() == {100, 101, 102}


def test_reducers_are_found_only_in_their_own_thread(members, at_once) -> None:
    barrier = Barrier(members(1), timeout=10)
    with use_reducer(barrier.reducer(100)):
        assert in_process_reducer().begin() == 2
        (elsewhere,) = at_once(in_process_reducer)
        assert isinstance(elsewhere, EngineError)
    with pytest.raises(
        EngineError, match=r"no barrier in this process\. Set fedtan-transport to"
    ):
        in_process_reducer()


def test_arithmetic_that_fails_in_any_way_drops_the_member_that_sent_last_and_no_call_hangs(
    members, monkeypatch
) -> None:
    def fails(*_: object) -> None:
        raise IndexError("no such row")

    monkeypatch.setattr("fedbn_flwr.transport.barrier.combine", fails)

    barrier, outcomes = Barrier(members(1, 1), timeout=3600), {}
    for node_id in (100, 101):
        barrier.send(node_id, 0, "gradients/0", row(1), outcomes.update)
    assert (type(outcomes[100]), type(outcomes[101])) == (RetryStep, Dropped)
    barrier.send(100, 1, "gradients/0", row(1), outcomes.update)
    assert type(outcomes[100]) is Dropped
    assert set(barrier.dropped) == {100, 101}

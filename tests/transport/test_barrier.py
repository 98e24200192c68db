"""The barrier reduces to exact sums, and no member waits forever."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch

from fedbn_flwr.errors import EngineError
from fedbn_flwr.transport import (
    Barrier,
    Dropped,
    RetryStep,
    in_process_reducer,
    use_reducers,
)


def row(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


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


def test_late_members_are_dropped_and_the_others_retry_once(
    members, at_once, steps
) -> None:
    """Many members notice the end of the time together, but only one acts on it."""
    barrier = Barrier(members(*[1] * 9), timeout=0.3)
    barrier.reducer(104).begin()
    here = [100, 101, 102, 103, 105, 106, 107]
    done = at_once(
        *(
            partial(
                steps, barrier.reducer(i), {"gradients/0": row(i), "variance/0": row(1)}
            )
            for i in here
        )
    )
    assert [attempts for _, _, attempts in done] == [2] * 7
    assert {union for _, union, _ in done} == {sum(2 + i - 100 for i in here)}
    assert done[0][0]["gradients/0"] == pytest.approx(sum(here) / 7)
    assert barrier.dropped[104] == "did not send exchange 'gradients/0' within 0.3 s"
    assert barrier.dropped[108].startswith("did not begin the step within 0.3 s")
    assert "init-args-num-cpus=9" in barrier.dropped[108]
    with pytest.raises(
        Dropped,
        match="node 104 was dropped from the synchronised step: it did not send",
    ):
        barrier.reducer(104).reduce("gradients/0", row(1))
    with pytest.raises(Dropped, match="node 108 was dropped"):
        barrier.reducer(108).begin()
    with pytest.raises(Dropped, match="node 7 is not a member"):
        barrier.reducer(7).begin()


def test_where_members_take_turns_none_is_late_while_another_computes(
    members, at_once, steps
) -> None:
    barrier = Barrier(members(1, 1, 1, 1), timeout=1, in_turns=True)

    def after(i: int) -> object:
        time.sleep(0.4 * i)
        return steps(barrier.reducer(100 + i), {"gradients/0": row(i)})

    done = at_once(*(partial(after, i) for i in range(4)))
    assert barrier.dropped == {}
    assert [attempts for _, _, attempts in done] == [1] * 4


def test_without_waiting_the_outcomes_come_together_and_late_members_are_dropped(
    members, monkeypatch
) -> None:
    barrier, now = Barrier(members(1, 1, 2, 1), timeout=5), [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    first, second = list[dict[int, Any]](), list[dict[int, Any]]()
    then = {
        100: first.append,
        101: first.append,
        102: second.append,
        103: second.append,
    }

    def send(node_id: int, attempt: int, tag: str = "gradients/0") -> None:
        barrier.send(node_id, attempt, tag, row(node_id), then[node_id])

    for node_id in then:
        assert barrier.begin(node_id) == (0, 2 + 3 + 4 + 5)
        send(node_id, 0)
    mean = (100 + 101 + 2 * 102 + 103) / 5
    assert (first, second) == (
        [{100: row(mean), 101: row(mean)}],
        [{102: row(mean), 103: row(mean)}],
    )

    for node_id in (100, 101, 102):
        send(node_id, 0, "variance/0")
    barrier.drop_late()
    assert len(first) == len(second) == 1, "nobody was late"
    for _ in range(5):
        now[0] += 1
        barrier.drop_late()
    assert isinstance(second.pop()[102], RetryStep)
    assert {node_id: type(error) for node_id, error in first.pop().items()} == {
        100: RetryStep,
        101: RetryStep,
    }
    send(102, 0, "variance/0")
    assert isinstance(second.pop()[102], RetryStep), (
        "a tensor of the attempt that is over"
    )
    send(103, 1)
    assert isinstance(second.pop()[103], Dropped)
    assert barrier.dropped == {103: "did not send exchange 'variance/0' within 5 s"}


def test_a_member_that_is_done_is_not_late_when_another_one_is(
    members, monkeypatch
) -> None:
    barrier, now = Barrier(members(1, 1, 1), timeout=5), [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for node_id in barrier.members:
        barrier.begin(node_id)
    for node_id in barrier.members:
        barrier.send(node_id, 0, "gradients/0", row(1), lambda outcomes: None)
    barrier.close(100)
    # one exchange more than 100 had
    barrier.send(101, 0, "mean/1", row(1), lambda outcomes: None)
    for _ in range(6):
        now[0] += 1
        barrier.drop_late()
    assert list(barrier.dropped) == [102]
    assert 100 in barrier.finished_with()


@pytest.mark.parametrize(
    "tensor", [row(1, 2, 3), row(1, 2, dtype=torch.float32)], ids=["shape", "dtype"]
)
def test_a_tensor_of_another_shape_or_dtype_drops_its_sender(
    members, at_once, steps, tensor: torch.Tensor
) -> None:
    """Other faults of a sender are in tests/strategies/test_fedtan_dropouts.py."""
    barrier = Barrier(members(1, 1, 2), timeout=10)
    sent = {100: tensor, 101: row(1, 2), 102: row(1, 2)}
    bad, *others = at_once(
        *(partial(steps, barrier.reducer(i), {"gradients/0": sent[i]}) for i in sent)
    )
    assert isinstance(bad, Dropped)
    assert list(barrier.dropped) == [100]
    for answers, union, _ in others:
        assert union == 3 + 4
        assert torch.equal(answers["gradients/0"], row(1, 2))


def test_tensors_that_cannot_be_combined_end_the_step(members, at_once, steps) -> None:
    barrier = Barrier(members(1, 1), timeout=10)
    done = at_once(
        *(
            partial(steps, barrier.reducer(100 + i), {"moments/0": torch.ones(2, 5)})
            for i in range(2)
        )
    )
    assert all(isinstance(error, Dropped) for error in done)
    why = "sent torch.float32 of shape (2, 5) in exchange 'moments/0'"
    assert set(barrier.dropped.values()) == {why}


def test_a_member_that_leaves_is_dropped_unless_it_was_done(
    members, at_once, steps
) -> None:
    barrier = Barrier(members(1, 1, 1), timeout=10)

    def leave() -> None:
        barrier.reducer(100).begin()
        time.sleep(0.1)
        barrier.leave(100, "was switched off")

    start = time.monotonic()
    _, *others = at_once(
        leave,
        *(
            partial(steps, barrier.reducer(i), {"gradients/0": row(1)})
            for i in (101, 102)
        ),
    )
    assert time.monotonic() - start < 5
    assert [(union, attempts) for _, union, attempts in others] == [(3 + 4, 2)] * 2
    assert barrier.dropped == {100: "was switched off"}
    assert barrier.finished_with() == [101, 102]
    barrier.leave(101, "after the step")
    barrier.leave(100, "a second time")
    assert barrier.dropped == {100: "was switched off"}


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Provide the clock as a list, so that ``clock[0] += 1`` adds a second."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_time_in_which_the_server_was_paused_does_not_count(
    members, clock: list[float]
) -> None:
    barrier = Barrier(members(1, 1), timeout=5)
    for node_id in (100, 101):
        barrier.begin(node_id)
    barrier.send(100, 0, "gradients/0", row(1), lambda outcomes: None)
    for seconds in (1, 100, 1, 1):
        clock[0] += seconds
        barrier.drop_late()
    assert barrier.dropped == {}
    for _ in range(3):
        clock[0] += 1
        barrier.drop_late()
    assert barrier.dropped.keys() == {101}


@pytest.mark.parametrize("in_turns", [True, False])
def test_where_members_compute_in_turns_each_that_begins_has_the_whole_time(
    members, clock: list[float], in_turns: bool
) -> None:
    barrier = Barrier(members(1, 1, 1), timeout=5, in_turns=in_turns)
    barrier.begin(100)
    barrier.send(100, 0, "gradients/0", row(1), lambda outcomes: None)
    for node_id in (101, 102):
        for _ in range(3):
            clock[0] += 1
            barrier.drop_late()
        if node_id not in barrier.dropped:
            barrier.begin(node_id)
    assert (barrier.dropped == {}) is in_turns


def test_where_too_few_are_left_those_that_hang_are_not_waited_for(
    members, clock: list[float]
) -> None:
    barrier = Barrier(members(1, 1, 1), timeout=5, min_members=3)
    for node_id in (100, 101, 102):
        barrier.begin(node_id)
    barrier.leave(100, "went away")
    for _ in range(100):
        clock[0] += 0.1
        barrier.drop_late()
    assert barrier.dropped.keys() == {100, 101, 102}


def test_a_reducer_of_an_earlier_attempt_must_retry(members) -> None:
    barrier = Barrier(members(1, 1), timeout=10)
    reducer = barrier.reducer(101)
    reducer.begin()
    barrier.leave(100, "was switched off")
    with pytest.raises(RetryStep, match="attempt 0 is over; attempt 1 has begun"):
        reducer.reduce("gradients/0", row(1))
    assert reducer.begin() == 3
    assert reducer.reduce("gradients/0", row(5)) == 5


def test_reducers_are_found_only_in_their_own_thread(members, at_once) -> None:
    barrier = Barrier(members(1), timeout=10)
    with use_reducers({"a": barrier.reducer(100)}.__getitem__):
        assert in_process_reducer("a").begin() == 2
        with pytest.raises(
            EngineError,
            match=r"no barrier 'b' in this process\. Set fedtan-transport to",
        ):
            in_process_reducer("b")
        (elsewhere,) = at_once(partial(in_process_reducer, "a"))
        assert isinstance(elsewhere, EngineError)
    with pytest.raises(EngineError):
        in_process_reducer("a")


def test_arithmetic_that_fails_in_any_way_drops_the_member_that_sent_last_and_no_call_hangs(
    members, monkeypatch
) -> None:
    def fails(*_: object) -> None:
        raise IndexError("no such row")

    monkeypatch.setattr("fedbn_flwr.transport.barrier.combine", fails)

    barrier, outcomes = Barrier(members(1, 1), timeout=3600), {}
    for node_id in (100, 101):
        barrier.send(node_id, 0, "gradients/0", torch.ones(1), outcomes.update)
    assert {node_id: type(outcome) for node_id, outcome in outcomes.items()} == {
        100: RetryStep,
        101: Dropped,
    }
    barrier.send(100, 1, "gradients/0", torch.ones(1), outcomes.update)
    assert type(outcomes[100]) is Dropped
    assert set(barrier.dropped) == {100, 101}

"""The default generators are seeded for one client at a time, and restored."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.training import batches_of, randomness
from fedbn_flwr.training.randomness import (
    Generators,
    Wait,
    interrupted,
    seed_secretly,
    seeded,
    turn,
)

X = torch.ones(40, 6)


def drawn() -> Tensor:
    """Draw from every default generator, even inside layers."""
    lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.5)
    own = [
        torch.tensor(random.random()),
        torch.tensor(np.random.rand()),
        torch.rand(3),
        nn.Dropout(0.5)(X),
    ]
    return torch.cat(
        [value.detach().double().flatten() for value in [*own, lstm(X[None])[0]]]
    )


def test_draws_repeat_and_the_generators_are_restored() -> None:
    with seeded(5):
        first, second = drawn(), drawn()
    before = Generators.now()
    following = drawn()
    before.restore()
    with seeded(5):
        assert torch.equal(drawn(), first), "does not repeat"
    assert torch.equal(drawn(), following), "the generators were not restored"
    with seeded(6):
        assert not torch.equal(drawn(), first), "does not depend on the seed"
    assert not torch.equal(first, second), "the stream does not move on"


def test_what_is_drawn_in_secret_follows_no_seed() -> None:
    def each() -> tuple[float, float, float]:
        seed_secretly()
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    with seeded(5):
        first = each()
    with seeded(5):
        second = each()
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_the_generators_are_restored_after_an_error() -> None:
    before = torch.get_rng_state()
    try:
        with turn(3):
            torch.rand(1)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.get_rng_state(), before)
    with turn(3):  # the lock is free again
        pass


def test_clients_that_wait_for_each_other_draw_as_if_alone() -> None:
    """While all wait, the generators are as before."""
    before, waiting = torch.get_rng_state(), list[Tensor]()
    barrier = threading.Barrier(4, lambda: waiting.append(torch.get_rng_state()))

    def work(seed: int, alone: bool) -> Tensor:
        with turn(seed):
            found = []
            for _ in range(20):
                found.append(drawn())
                with interrupted():
                    if not alone:
                        barrier.wait()
            return torch.stack(found)

    alone = [work(seed, alone=True) for seed in range(4)]
    together: dict[int, Tensor] = {}

    def run(seed: int) -> None:
        together[seed] = work(seed, alone=False)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(together[seed], alone[seed]) for seed in range(4))
    assert len(waiting) == 20
    assert all(torch.equal(state, before) for state in waiting)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_wait_ends_when_told_to_and_takes_its_turn_in_order() -> None:
    order: list[str] = []
    with turn(0):
        wait = Wait()
        wait.end()
        wait.end()
        later = threading.Thread(target=lambda: _do_in_turn(order, "later"))
        with wait:
            while not wait.is_over(0.01):
                pass
            assert wait.is_over(0)
            later.start()
            order.append("first")
    later.join()
    assert order == ["first", "later"]


def _do_in_turn(order: list[str], name: str) -> None:
    with turn(1):
        order.append(name)


def test_what_is_drawn_on_a_gpu_from_a_stream_moves_on_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, stream = torch.Generator().manual_seed(1), torch.Generator()
    monkeypatch.setattr(randomness, "_has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [gpu.get_state()])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state_all", lambda states: gpu.set_state(states[0])
    )
    monkeypatch.setattr(torch.cuda, "manual_seed_all", gpu.manual_seed)
    before, drawn = gpu.get_state(), []

    def draw(_: Any) -> tuple[Tensor, Tensor]:
        drawn.append(float(torch.rand((), generator=gpu)))
        return X[:1], X[:1]

    data = batches_of(DataLoader(TensorDataset(X), collate_fn=draw))
    for _ in range(2):
        stream.manual_seed(3)
        for _ in range(3):
            data.batch(torch.tensor([0]), stream)
    assert torch.equal(gpu.get_state(), before)
    assert drawn[:3] == drawn[3:]
    assert len(set(drawn)) == 3


def test_a_client_that_breaks_the_generators_does_not_keep_its_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    usual = np.random.get_bit_generator()  # type: ignore[no-untyped-call]
    try:
        with turn(0):
            np.random.set_bit_generator(np.random.PCG64())  # type: ignore[no-untyped-call]
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[no-untyped-call]
    assert (
        "the state of the random generators remains as a client left it: ValueError: "
        in caplog.text
    )
    order: list[str] = []
    later = threading.Thread(target=_do_in_turn, args=(order, "later"), daemon=True)
    later.start()
    later.join(10)
    assert order == ["later"]


def test_a_wait_that_cannot_begin_takes_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> Generators:
        raise RuntimeError("CUDA error")

    waits: list[Wait] = []
    with turn(0):
        monkeypatch.setattr(Generators, "now", broken)
        with pytest.raises(RuntimeError, match="CUDA error"):
            # A barrier lists a wait immediately and ends all listed waits.
            waits.append(Wait())
        monkeypatch.undo()
    assert not waits

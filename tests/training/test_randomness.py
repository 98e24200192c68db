"""The default generators are seeded for one client at a time, and restored."""

from __future__ import annotations

import operator
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr.training.randomness import (
    Generators,
    seed_secretly,
    seeded,
)
from fedbn_flwr.transport.turns import Wait, turn

X = torch.ones(40, 6)


def drawn() -> Tensor:
    """Draw from every default generator, even inside layers."""
    lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.5)
    numbers = torch.tensor([random.random(), np.random.rand()])
    own = [numbers, torch.rand(3), nn.Dropout(0.5)(X), lstm(X[None])[0]]
    return torch.cat([value.detach().double().flatten() for value in own])


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
        with seeded(5):
            seed_secretly()
            return random.random(), float(np.random.rand()), float(torch.rand(1))

    assert not any(map(operator.eq, each(), each()))


def test_the_generators_are_restored_after_an_error() -> None:
    before = torch.get_rng_state()
    with suppress(KeyError), turn(3):
        torch.rand(1)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    with turn(3):  # the lock is free again
        pass


def test_a_client_that_replaces_a_generator_gives_its_turn_back(caplog) -> None:
    usual = np.random.get_bit_generator()
    with turn(3):
        np.random.set_bit_generator(np.random.PCG64())
    with turn():
        np.random.set_bit_generator(usual)
    assert caplog.text.count("the random generators remains as a client left it") == 2


def test_clients_that_wait_for_each_other_draw_as_if_alone() -> None:
    """While all wait, the generators are as before."""
    before, waiting = torch.get_rng_state(), []
    barrier = threading.Barrier(4, lambda: waiting.append(torch.get_rng_state()))

    def work(seed: int, alone: bool) -> Tensor:
        with turn(seed):
            found = []
            for _ in range(20):
                found.append(drawn())
                with Wait():
                    if not alone:
                        barrier.wait()
            return torch.stack(found)

    alone = [work(seed, alone=True) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        together = [*threads.map(work, range(4), [False] * 4)]
    assert all(map(torch.equal, together, alone))
    assert len(waiting) == 20
    for state in (*waiting, torch.get_rng_state()):
        assert torch.equal(state, before)


def test_a_wait_ends_when_told_to_and_takes_its_turn_in_order() -> None:
    order = []

    def do_in_turn() -> None:
        with turn(1):
            order.append("later")

    with turn(0):
        wait = Wait()
        wait.end()
        wait.end()
        later = threading.Thread(target=do_in_turn)
        with wait:
            while not wait.is_over(0.01):
                pass
            assert wait.is_over(0)
            later.start()
            order.append("first")
    later.join()
    assert order == ["first", "later"]

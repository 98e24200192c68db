"""Layers that draw random numbers use a private stream."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import StochasticDepth

from fedbn_flwr.training.randomness import private_randomness

CPU = torch.device("cpu")
X = torch.ones(40, 6)
ATTENTION = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
LSTM = nn.LSTM(6, 6, num_layers=2, dropout=0.5)
DRAWS: dict[str, Callable[[], Tensor]] = {
    "Dropout": lambda: nn.Dropout(0.5)(X),
    "Dropout1d": lambda: nn.Dropout1d(0.5)(X.reshape(10, 4, 6)),
    "Dropout2d": lambda: nn.Dropout2d(0.5)(X.reshape(4, 10, 2, 3)),
    "AlphaDropout": lambda: nn.AlphaDropout(0.5)(X),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.5)(X.reshape(4, 10, 6)),
    "in place": lambda: F.dropout(X.clone(), 0.5, inplace=True),
    "RReLU": lambda: nn.RReLU()(-X),
    "StochasticDepth": lambda: StochasticDepth(0.5, "row")(X),
    "attention": lambda: F.scaled_dot_product_attention(X[None], X[None], X[None], dropout_p=0.5),
    "gumbel": lambda: F.gumbel_softmax(X),
    "torch.dropout": lambda: torch.dropout(X, 0.5, True),
    "torch.alpha_dropout": lambda: torch.alpha_dropout(X, 0.5, True),
    "native_dropout": lambda: torch.native_dropout(X, 0.5, True)[0],
    "MultiheadAttention": lambda: ATTENTION(X[None], X[None], X[None])[0].detach(),
    "LSTM": lambda: LSTM(X[None])[0].detach(),
    "binomial": lambda: torch.binomial(X * 10, X / 2),
    "poisson": lambda: torch.poisson(X),
    "Gamma": lambda: torch.distributions.Gamma(X, X).sample(),
    "rand": lambda: torch.rand(9),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(1000, (9,)),
    "randperm": lambda: torch.randperm(50),
    "normal": lambda: torch.normal(0.0, 1.0, (9,)),
    "normal_": lambda: torch.empty(9).normal_(),
    "multinomial": lambda: torch.multinomial(X, 3),
    "bernoulli": lambda: torch.bernoulli(X / 2),
}


def drawn(draw: Callable[[], Tensor], seed: int) -> Tensor:
    with private_randomness(seed, CPU):
        return torch.stack([draw(), draw()])


@pytest.mark.parametrize("name", DRAWS)
def test_draws_repeat_and_do_not_change_the_global_generator(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = drawn(draw, 5)
    assert torch.equal(torch.get_rng_state(), before), "drew from the global generator"
    torch.rand(17)
    assert torch.equal(drawn(draw, 5), first), "depends on the global generator"
    assert not torch.equal(first[0], first[1]), "the stream does not move on"
    assert not torch.equal(drawn(draw, 6), first), "does not depend on the seed"


def test_a_given_generator_is_used() -> None:
    with private_randomness(0, CPU):
        got = torch.rand(5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(got, torch.rand(5, generator=torch.Generator().manual_seed(3)))


def test_eval_mode_draws_nothing_and_the_mode_ends() -> None:
    layer = nn.Dropout(0.5).eval()
    with private_randomness(0, CPU):
        assert torch.equal(layer(X), X)
    before = torch.get_rng_state()
    torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), before)


def test_gradients_use_the_mask_of_the_forward_pass() -> None:
    x = torch.ones(1000, requires_grad=True)
    with private_randomness(0, CPU):
        y = F.dropout(x, 0.25)
        y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert sorted(set(y.tolist())) == [0.0, pytest.approx(4 / 3)]


def test_threads_do_not_disturb_one_another() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.3))

    def work(seed: int) -> Tensor:
        with private_randomness(seed, CPU):
            return torch.stack([model(X).detach() for _ in range(20)])

    alone = [work(seed) for seed in range(4)]
    together: dict[int, Tensor] = {}
    start = threading.Barrier(5)

    def run(seed: int) -> None:
        start.wait()
        together[seed] = work(seed)

    def disturb() -> None:
        start.wait()
        for _ in range(200):
            torch.rand(3)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)] + [threading.Thread(target=disturb)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(together[seed], alone[seed]) for seed in range(4))

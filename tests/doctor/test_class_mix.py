"""One client's class mix against the others': the likelihood ratio, its moments, its level, and who stands out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fedbn_flwr.doctor.class_mix import compare_mixes, moments, tail
from fedbn_flwr.doctor.each_client import class_mixes

BOUND = 4.0


def ratio(own: list[int], together: list[int]) -> float:
    """Return G by its definition."""
    found, size, total = 0.0, sum(own), sum(together)
    for x, t in zip(own, together, strict=True):
        for count, expected in ((x, t * size / total), (t - x, t - t * size / total)):
            found += 2 * count * math.log(count / expected) if count else 0.0
    return found


@pytest.mark.parametrize(("together", "size"), [([4, 3, 2], 3), ([6, 2], 4), ([3, 0, 3, 2], 5), ([8, 1, 1], 2)])
def test_the_moments_are_those_of_all_ways_to_deal_the_examples(together: list[int], size: int) -> None:
    classes = [c for c, count in enumerate(together) for _ in range(count)]
    values = [
        ratio([sum(classes[k] == c for k in chosen) for c in range(len(together))], together)
        for chosen in itertools.combinations(range(len(classes)), size)
    ]
    expected = torch.tensor(values, dtype=torch.float64)
    own = torch.bincount(torch.tensor(classes[:size]), minlength=len(together)).double()
    found, mean, variance = moments(own, torch.tensor(together, dtype=torch.float64))
    assert float(found) == pytest.approx(ratio(own.int().tolist(), together), rel=1e-12)
    assert float(mean) == pytest.approx(float(expected.mean()), rel=1e-12)
    # It is that of independent classes with their total given: of a few examples roughly right, and rather too large.
    assert 0.6 * float(expected.var()) < float(variance) < 3 * float(expected.var()) + 1


@pytest.mark.parametrize("width", [2, 10, 40])
@pytest.mark.parametrize("size", [12, 150])
def test_under_one_mix_the_tail_is_a_probability(width: int, size: int) -> None:
    """Also where a class has less than one example of a client, and chi-square's tail is wrong."""
    torch.manual_seed(0)
    usual = torch.rand(width) + 0.1
    others = torch.bincount(torch.multinomial(usual, 1000, True), minlength=width).double()
    tails = []
    for drawn in torch.multinomial(usual.expand(500, width), size, True):
        own = torch.bincount(drawn, minlength=width).double()
        tails.append(float(tail(*moments(own, own + others))))
    assert sum(p < 0.02 for p in tails) / 500 < 0.04
    assert 0.3 < sum(tails) / 500 < 0.7


def dealt(clients: int, examples: int, alpha: float, width: int = 10, seed: int = 0) -> Tensor:
    """Return the counts of clients of uneven sizes, under one mix or by Dirichlet(alpha)."""
    torch.manual_seed(seed)
    rows = []
    for _ in range(clients):
        mix = torch.distributions.Dirichlet(torch.full((width,), alpha)).sample() if alpha else torch.ones(width)
        size = max(8, int(examples * (0.4 + 1.2 * torch.rand(()))))
        rows.append(torch.bincount(torch.multinomial(mix, size, True), minlength=width))
    return torch.stack(rows).double()


@pytest.mark.parametrize(
    ("clients", "examples", "odd"), [(5, 120, [1]), (5, 300, [1, 4]), (8, 2000, [0]), (20, 100, [3, 7]), (40, 100, [2])]
)
def test_clients_with_half_of_the_classes_stand_out(clients: int, examples: int, odd: list[int]) -> None:
    counts = dealt(clients, examples, 0.0)
    for k in odd:
        counts[k, 5:] = 0
    far, _, found = compare_mixes(counts, BOUND)
    assert found == odd
    assert all(0.4 < float(far[k]) < 0.65 for k in odd)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 2.0])
@pytest.mark.parametrize(("clients", "examples"), [(5, 300), (14, 120), (40, 45)])
def test_no_client_stands_out_of_one_mix_or_where_all_mixes_differ(clients: int, examples: int, alpha: float) -> None:
    for seed in range(2):
        assert compare_mixes(dealt(clients, examples, alpha, seed=seed), BOUND)[2] == []


def test_a_small_difference_of_large_clients_is_no_exception() -> None:
    counts = dealt(6, 50_000, 0.0)
    counts[2, 0] *= 1.5
    far, scores, found = compare_mixes(counts, BOUND)
    assert float(scores[2]) > 10
    assert (float(far[2]) < 0.1, found) == (True, [])


def test_one_class_has_one_mix() -> None:
    classes, owner = torch.zeros(40, dtype=torch.int64), torch.arange(40) % 5
    assert class_mixes(classes, owner).odd == []

"""Each client's class mix against that of all the others, by the likelihood ratio of the counts.

For a client with x_c of the T_c examples of class c, n of N in all, and e_c = T_c n / N,

    G = 2 sum_c x_c log(x_c / e_c) + (T_c - x_c) log((T_c - x_c) / (T_c - e_c)).

Under one class mix the examples are dealt at random, and x is hypergeometric. The mean of G is then exact, the variance
is that of independent binomial counts with their total given (Morris 1975), and a gamma distribution with both gives
the tail: chi-square's is wrong where a class has few examples.

The client that stands out most is taken out first, and the others are compared without it, until none stands out: among
few clients one would hide another, or accuse a sound one. So the level is that of the first step, over all clients. If
the others differ, too, by design, a client must stand out from them as well: (G - mean) / (n (N - n) / N) estimates its
squared distance without the noise of sampling, and this over the others' is compared with an F distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbn_flwr.doctor.thresholds import MIN_MIX

__all__ = ["class_counts", "compare_mixes", "moments", "tail"]


def class_counts(classes: Tensor, owner: Tensor) -> Tensor:
    """Return the examples of each client in each class, float64 (K, C), given class and client of each example."""
    _, known = torch.unique(classes, return_inverse=True)
    clients, width = int(owner.max()) + 1, int(known.max()) + 1
    return torch.bincount(owner * width + known, minlength=clients * width).view(clients, width).double()


def compare_mixes(counts: Tensor, bound: float) -> tuple[Tensor, Tensor, list[int]]:
    """Return the distance of each client's mix from the usual one, its score, and which clients stand out.

    The usual mix is that of the clients which do not stand out. The distance is the total variation, in [0, 1], the
    score that of a standard normal variable with the same tail.

    Args:
        counts: the examples of each client in each class, (K, C).
        bound: the score above which a client stands out; its distance must be ``MIN_MIX``, too.
    """
    rest, removed = [*range(len(counts))], list[int]()
    while True:
        mixes = _Mixes.of(counts, rest)
        odd = [k for k in rest if mixes.stands_out(k, bound)]
        if not odd or len(odd) + len(removed) > max(2, len(counts) // 5):
            break
        worst = sorted(odd, key=lambda k: -mixes.ratio[k])[: max(1, len(odd) // 4)]
        removed += worst
        rest = [k for k in rest if k not in worst]
    if odd:  # so many differ by design
        removed = []
    degrees = max(1, int((counts.sum(0) > 0).sum()) - 1)
    beyond = {k: mixes.beyond(k, rest, degrees) for k in removed}
    found = [k for k in sorted(removed) if mixes.stands_out(k, bound) and beyond[k] > bound]
    return torch.tensor(mixes.distance), torch.tensor(mixes.score), found


@dataclass(frozen=True)
class _Mixes:
    """Each client against those of the rest but itself: its distance, G, score, and squared distance without noise."""

    distance: list[float]
    ratio: list[float]
    score: list[float]
    square: list[float]
    weight: list[float]

    @classmethod
    def of(cls, counts: Tensor, rest: list[int]) -> _Mixes:
        pooled, rows = counts[rest].sum(0), list[tuple[float, ...]]()
        for k, own in enumerate(counts):
            together = pooled if k in rest else pooled + own
            others = together - own
            distance = (own / own.sum() - others / others.sum()).abs().sum() / 2
            ratio, mean, variance = moments(own, together)
            weight = own.sum() * others.sum() / together.sum()
            score = -torch.special.ndtri(tail(ratio, mean, variance))
            rows.append(tuple(map(float, (distance, ratio, score, (ratio - mean) / weight, weight))))
        return cls(*map(list, zip(*rows, strict=True)))

    def stands_out(self, k: int, bound: float) -> bool:
        return self.score[k] > bound and self.distance[k] >= MIN_MIX

    def beyond(self, k: int, rest: list[int], degrees: int) -> float:
        """Return the score of a client's squared distance over that of the rest, as of an F distribution."""
        weight = sum(self.weight[j] for j in rest)
        usual = sum(self.square[j] * self.weight[j] for j in rest) / weight
        if usual <= 0:
            return math.inf
        root = math.cbrt(max(0.0, self.square[k]) / usual)
        # Paulson 1942: the cube root of F is the quotient of two nearly normal values.
        own, others = 2 / 9 / degrees, 2 / 9 / (degrees * len(rest))
        return ((1 - others) * root - (1 - own)) / math.sqrt(others * root**2 + own)


def moments(own: Tensor, together: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return G of a client, and its mean and variance if the examples were dealt at random.

    Args:
        own: the client's examples in each class, (C,).
        together: those of all clients that are compared, this one included.
    """
    own, together = own[together > 0], together[together > 0]
    size, total = own.sum(), together.sum()
    expected = together * size / total
    x = torch.arange(int(together.max()) + 1, dtype=torch.float64)[:, None]
    y = together - x
    possible = y >= 0
    y = y.clamp(min=0)
    x = torch.where(possible, x, 0.0)

    def term(x: Tensor, y: Tensor) -> Tensor:
        return 2 * (torch.xlogy(x, x / expected) + torch.xlogy(y, y / (together - expected).clamp(min=1e-300)))

    log_dealt = _log_binomial(together, x) + _log_binomial(total - together, size - x) - _log_binomial(total, size)
    log_binomial = _log_binomial(together, x) + torch.xlogy(x, size / total) + torch.xlogy(y, 1 - size / total)
    dealt, binomial = (torch.where(possible, value, -torch.inf).exp() for value in (log_dealt, log_binomial))
    values = term(x, y)
    mean = (dealt * values).sum()
    off, counts_off = values - (binomial * values).sum(0), x - expected
    squares, products = (binomial * off.square()).sum(), (binomial * off * counts_off).sum()
    given_total = squares - products.square() / (binomial * counts_off.square()).sum().clamp(min=1e-300)
    return term(own, together - own).sum(), mean, given_total * (len(own) - 1) / len(own)


def tail(ratio: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the probability of a G as large, by the gamma distribution with this mean and variance; at least 1e-300.

    It is 1 where G cannot vary.
    """
    if mean <= 0 or variance <= 0:
        return torch.ones_like(ratio)
    probability: Tensor = torch.special.gammaincc(mean.square() / variance, ratio * mean / variance)
    return probability.clamp(min=1e-300)


def _log_binomial(count: Tensor, chosen: Tensor) -> Tensor:
    """Return the logarithm of the number of ways to choose; minus infinity where there is none."""
    left = count - chosen
    ways = torch.lgamma(count + 1) - torch.lgamma(chosen.clamp(min=0) + 1) - torch.lgamma(left.clamp(min=0) + 1)
    return torch.where((chosen >= 0) & (left >= 0), ways, -torch.inf)

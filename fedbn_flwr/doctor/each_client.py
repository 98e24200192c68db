"""Each client against the others: which ones stand out in inputs, classes or accuracy.

A federation whose clients all differ is one thing, a client that differs from all the
others another. So each measure is compared with its median over the clients, in units
of their spread: the median absolute deviation, which two odd clients of five do not
move, and never less than the error of sampling. A client stands out if chance gives a
score as high to any client in any measure in one of 500 federations (Bonferroni).

A distance d of a client with n examples is compared twice, and both must stand out. If
the clients differ by chance alone, n d^2 is alike for all, so a small client is not odd
for its noise. If they differ by design, d is alike for all, so a large client is not
odd for its precision. Their cube roots are nearly normal (Wilson & Hilferty 1931).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from fedbn_flwr.doctor.differences import Groups, class_skew, degrees, group_means
from fedbn_flwr.doctor.thresholds import LEVEL, MIN_BELOW, MIN_MIX, MIN_SHIFT

__all__ = [
    "Compared",
    "EachClient",
    "accuracies",
    "class_mixes",
    "stand_out",
    "statistics",
]

_SHARE_OF_CLASSES = 0.5  # of the level: counts of few examples are the least evidence
_OTHERS = 2  # which share the rest: inputs of BatchNorm, accuracy


@dataclass(frozen=True)
class Compared:
    """One measure of each client, (K,) each.

    Attributes:
        values: the measure.
        scores: its distance from the median, in units of the spread; above 0 is worse.
        odd: indices of the clients that stand out, whatever the size of the difference.
    """

    values: list[float]
    scores: list[float]
    odd: list[int]


@dataclass(frozen=True)
class EachClient:
    """The measures of each client against the others; None = not measured.

    Attributes:
        mix: total variation distance of a client's class mix from the usual one.
        inputs: how far the inputs of BatchNorm are from the usual ones: root mean
            square over layers and channels, in standard deviations.
        below: the median accuracy minus the client's.
    """

    mix: Compared | None = None
    inputs: Compared | None = None
    below: Compared | None = None

    @property
    def other_mix(self) -> list[int]:
        """The clients with other classes."""
        return _large(self.mix, MIN_MIX)

    @property
    def other_inputs(self) -> list[int]:
        """The clients whose inputs look different to BatchNorm; where classes tell why
        they are left out.
        """
        return [k for k in _large(self.inputs, MIN_SHIFT) if k not in self.other_mix]

    @property
    def worse(self) -> list[int]:
        """The clients that are far below the others in accuracy, without a cause that
        is seen.
        """
        return [k for k in _large(self.below, MIN_BELOW) if k not in self.apart]

    @property
    def apart(self) -> list[int]:
        """The clients with another cause of their own: what is said of all clients
        leaves them out.
        """
        return sorted({*self.other_inputs, *self.other_mix})


def _large(compared: Compared | None, least: float) -> list[int]:
    return (
        []
        if compared is None
        else [k for k in compared.odd if compared.values[k] >= least]
    )


def stand_out(values: Tensor, errors: Tensor) -> Tensor:
    """Return each client's distance from the median, (K,), in units of the spread of
    all, but at least of its error.

    The factor makes the median absolute deviation of K normal values a standard
    deviation (Croux & Rousseeuw 1992).
    """
    centred = values - values.median()
    spread = 1.4826 * len(values) / (len(values) - 0.8) * centred.abs().median()
    return centred / torch.maximum(errors, spread).clamp(min=1e-12)


def _bound(clients: int, share: float) -> float:
    """Return the score that chance gives to one of so many clients with a share of the
    level.
    """
    return NormalDist().inv_cdf(1 - LEVEL * share / clients)


def _compared(values: Tensor, scores: Tensor) -> Compared:
    bound = _bound(len(values), (1 - _SHARE_OF_CLASSES) / _OTHERS)
    return Compared(
        values.tolist(),
        scores.tolist(),
        torch.nonzero(scores > bound).flatten().tolist(),
    )


def class_mixes(counts: Tensor) -> Compared:
    """Return the class mix of each client, given the examples of each client in each
    class, (K, C).

    A client stands out by the chi-square test of its counts against those of all the
    others, and among the distances of the others. If more than a fifth of the clients
    do (two, of few), or the others differ, too, it is by design.
    """
    distances, tails = [], []
    for own in counts:
        pair = torch.stack([own, counts.sum(0) - own])
        shares = pair / pair.sum(1, keepdim=True)
        distances.append((shares[0] - shares[1]).abs().sum() / 2)
        tails.append(class_skew(pair).p_value)
    far = torch.stack(distances)
    by_chance = -torch.special.ndtri(
        torch.tensor(tails, dtype=torch.float64).clamp(min=1e-300)
    )
    by_design = stand_out(far, far.median().expand_as(far) / 4)
    scores = torch.minimum(by_chance, by_design)
    bound = _bound(len(counts), _SHARE_OF_CLASSES)
    odd = [
        k for k in torch.nonzero(scores > bound).flatten().tolist() if far[k] >= MIN_MIX
    ]
    rest = [k for k in range(len(counts)) if k not in odd]
    if odd and (len(odd) > max(2, len(counts) // 5) or class_skew(counts[rest]).counts):
        odd = []
    return Compared(far.tolist(), scores.tolist(), odd)


def statistics(groups: Groups, eps: Mapping[str, float]) -> Compared:
    """Return how far the inputs of BatchNorm are from the usual ones, of each client,
    given eps of each layer.
    """
    rows, owner = [], groups.owner
    for path, moments in groups.layers.items():
        means = torch.stack([one.mean for one in moments])
        usual = group_means(means, owner).median(0).values
        square = (
            torch.stack([one.m2 / one.count for one in moments])
            + (means - usual).square()
        )
        variance = group_means(square, owner).median(0).values + eps[path]
        rows.append(
            torch.cat([(means - usual) / variance.sqrt(), square / variance], 1)
        )
    return _distances(torch.cat(rows, 1), owner)


def _distances(rows: Tensor, owner: Tensor) -> Compared:
    """Return the clients compared by the distance of their mean row from the usual one,
    its root mean square.
    """
    means, sizes = group_means(rows, owner), torch.bincount(owner).double()
    squares = (means - means.median(0).values).square().sum(1)
    left = rows - means[owner]
    free = max(1, len(rows) - len(sizes))
    roots = (sizes * squares / (sizes * squares).median().clamp(min=1e-300)).pow(1 / 3)
    by_chance = stand_out(
        roots, torch.full_like(roots, math.sqrt(2 / 9 / degrees(left, free)))
    )
    noise = left.square().sum() / free
    excess = (squares - noise / sizes).clamp(min=0).sqrt()
    by_design = stand_out(excess, excess.median().expand_as(excess) / 4)
    return _compared(
        (squares / rows.shape[1]).sqrt(), torch.minimum(by_chance, by_design)
    )


def accuracies(values: Sequence[float], sizes: Sequence[int]) -> Compared:
    """Return how far each client is below the median accuracy, given each client's
    accuracy and examples.
    """
    accuracy, count = (
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(sizes, dtype=torch.float64),
    )
    # never 0 or 1 (Agresti & Coull 1998)
    usual = (accuracy.median() * count + 2) / (count + 4)
    below = accuracy.median() - accuracy
    return _compared(below, stand_out(below, (usual * (1 - usual) / count).sqrt()))

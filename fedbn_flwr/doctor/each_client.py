"""Each client against the others: who stands out in inputs, classes or accuracy.

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
        """The clients whose inputs look different, and not for their classes."""
        return [k for k in _large(self.inputs, MIN_SHIFT) if k not in self.other_mix]

    @property
    def worse(self) -> list[int]:
        """The clients far below the others in accuracy, for no cause that is seen."""
        return [k for k in _large(self.below, MIN_BELOW) if k not in self.apart]

    @property
    def apart(self) -> list[int]:
        """The clients with a cause of their own.

        What is said of all clients leaves them out.
        """
        return sorted({*self.other_inputs, *self.other_mix})


def _large(compared: Compared | None, least: float) -> list[int]:
    """Return the odd clients whose difference is large enough to matter."""
    if compared is None:
        return []
    return [k for k in compared.odd if compared.values[k] >= least]


def stand_out(values: Tensor, errors: Tensor) -> Tensor:
    """Return each client's score, (K,): its distance from the median, without unit.

    The unit is the spread of all clients, or the client's error where that is larger.
    The factor makes the median absolute deviation of K normal values a standard
    deviation (Croux & Rousseeuw 1992).
    """
    centred = values - values.median()
    spread = 1.4826 * len(values) / (len(values) - 0.8) * centred.abs().median()
    return centred / torch.maximum(errors, spread).clamp(min=1e-12)


def _bound(clients: int, share: float) -> float:
    """Return the score that chance gives to any of so many clients that rarely.

    ``share`` is the measure's part of the level, by Bonferroni.
    """
    return NormalDist().inv_cdf(1 - LEVEL * share / clients)


def _compared(values: Tensor, scores: Tensor) -> Compared:
    bound = _bound(len(values), (1 - _SHARE_OF_CLASSES) / _OTHERS)
    odd = torch.nonzero(scores > bound).flatten()
    return Compared(values.tolist(), scores.tolist(), odd.tolist())


def class_mixes(counts: Tensor) -> Compared:
    """Return the class mix of each client against the others', given counts (K, C).

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
    # The p value as a score of a normal value, to be compared with the other score.
    p_values = torch.tensor(tails, dtype=torch.float64).clamp(min=1e-300)
    by_chance = -torch.special.ndtri(p_values)
    by_design = _among_designed(far)
    scores = torch.minimum(by_chance, by_design)

    bound = _bound(len(counts), _SHARE_OF_CLASSES)
    odd, rest = [], []
    for k, score in enumerate(scores.tolist()):
        if score > bound and distances[k] >= MIN_MIX:
            odd.append(k)
        else:
            rest.append(k)
    # Many odd clients, or others that differ as well: label skew of the federation.
    if odd and (len(odd) > max(2, len(counts) // 5) or class_skew(counts[rest]).counts):
        odd = []
    return Compared(far.tolist(), scores.tolist(), odd)


def _among_designed(distances: Tensor) -> Tensor:
    """Return the scores of distances that differ by design, and vary by a quarter."""
    return stand_out(distances, distances.median().expand_as(distances) / 4)


def statistics(groups: Groups, eps: Mapping[str, float]) -> Compared:
    """Return how far each client's inputs of BatchNorm are from the usual ones.

    The usual mean and mean square are medians over the clients: of many equal ones, an
    odd client does not move them, as it moves the mean. ``eps`` is each layer's.
    """
    rows, owner = [], groups.owner
    for path, moments in groups.layers.items():
        means = torch.stack([one.mean for one in moments])
        usual = group_means(means, owner).median(0).values
        within = torch.stack([one.m2 / one.count for one in moments])
        # About the usual mean: a shift of the mean shows in both halves of a row.
        square = within + (means - usual).square()
        variance = group_means(square, owner).median(0).values + eps[path]
        rows.append(
            torch.cat([(means - usual) / variance.sqrt(), square / variance], 1)
        )
    return _distances(torch.cat(rows, 1), owner)


def _distances(rows: Tensor, owner: Tensor) -> Compared:
    """Return the clients compared by how far their mean row is from the usual one."""
    means, sizes = group_means(rows, owner), torch.bincount(owner).double()
    squares = (means - means.median(0).values).square().sum(1)
    left = rows - means[owner]
    free = max(1, len(rows) - len(sizes))

    # By chance n d^2 is alike: a chi-square value of ``degrees``, whose cube root has a
    # relative variance of 2 / (9 degrees) (Wilson & Hilferty).
    weighted = sizes * squares
    roots = (weighted / weighted.median().clamp(min=1e-300)).pow(1 / 3)
    error = math.sqrt(2 / 9 / degrees(left, free))
    by_chance = stand_out(roots, torch.full_like(roots, error))

    # By design d is alike: what is left of it without the noise of n groups.
    noise = left.square().sum() / free
    by_design = _among_designed((squares - noise / sizes).clamp(min=0).sqrt())
    root_mean_square = (squares / rows.shape[1]).sqrt()
    return _compared(root_mean_square, torch.minimum(by_chance, by_design))


def accuracies(values: Sequence[float], sizes: Sequence[int]) -> Compared:
    """Return how far each client is below the median accuracy.

    Args:
        values: each client's accuracy.
        sizes: each client's examples.
    """
    accuracy = torch.tensor(values, dtype=torch.float64)
    count = torch.tensor(sizes, dtype=torch.float64)
    # Two right and two wrong answers more: never 0 or 1, so that the binomial standard
    # error of few examples is not 0 (Agresti & Coull 1998).
    usual = (accuracy.median() * count + 2) / (count + 4)
    error = (usual * (1 - usual) / count).sqrt()
    below = accuracy.median() - accuracy
    return _compared(below, stand_out(below, error))

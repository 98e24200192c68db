"""Each client against the others: who stands out in inputs, classes, repeated examples
or accuracy.

A federation whose clients all differ is one thing, a client that differs from all the
others another. So each measure is compared with its median over the clients, in units
of their spread: the median absolute deviation, which two odd clients of five do not
move, and never less than the error of sampling. A client stands out if chance gives a
score as high to any client in any measure in one of 500 federations (Bonferroni).

A distance d of a client with n examples is compared twice, and both must stand out. If
the clients differ by chance alone, n d^2 is alike for all, so a small client is not odd
for its noise. If they differ by design, d is alike for all, so a large client is not
odd for its precision.

Chance is measured for the inputs, whose columns have long tails in many tables: the
same groups of examples are dealt to the clients at random, and a client stands out if
it is further than each client of each of 500 such federations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor, nn

from fedbn_flwr.doctor.differences import Groups, class_skew
from fedbn_flwr.doctor.thresholds import (
    LEVEL,
    MIN_BELOW,
    MIN_MIX,
    MIN_REPEATED,
    MIN_SHIFT,
    NO_VARIANCE,
    RE_SPLITS,
)
from fedbn_flwr.errors import needs_package

__all__ = [
    "Compared",
    "EachClient",
    "below_median",
    "class_mixes",
    "distinct_share",
    "stand_out",
    "statistics",
]

_SHARE_OF_CLASSES = 0.5  # of the level: counts of few examples are the least evidence
_OTHERS = 3  # which share the rest: inputs, distinct examples, accuracy


# Of the mean over columns: one that is far out counts as many that are a little.
_POWER = 8


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
        repeated: the median share of distinct examples minus the client's.
        below: the median accuracy minus the client's.
    """

    mix: Compared | None = None
    inputs: Compared | None = None
    repeated: Compared | None = None
    below: Compared | None = None

    @property
    def other_mix(self) -> list[int]:
        """The clients with other classes."""
        return _large(self.mix, MIN_MIX)

    @property
    def other_inputs(self) -> list[int]:
        """The clients whose inputs look different, for no cause that is seen."""
        known = {*self.other_mix, *self.repeating}
        return [k for k in _large(self.inputs, MIN_SHIFT) if k not in known]

    @property
    def repeating(self) -> list[int]:
        """The clients whose examples are repeated."""
        return _large(self.repeated, MIN_REPEATED)

    @property
    def worse(self) -> list[int]:
        """The clients far below the others in accuracy, for no cause that is seen."""
        return [k for k in _large(self.below, MIN_BELOW) if k not in self.apart]

    @property
    def apart(self) -> list[int]:
        """The clients with a cause of their own.

        What is said of all clients leaves them out.
        """
        return sorted({*self.other_inputs, *self.other_mix, *self.repeating})


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
    """Return how far each client's inputs are from the usual ones.

    They are the inputs of BatchNorm and of the model. The usual mean and variance are
    medians, which an odd client does not move. ``eps`` is each layer's.
    """
    rows = []
    for path, moments in {"": groups.inputs, **groups.layers}.items():
        means = torch.stack([one.mean for one in moments])
        variances = torch.stack([one.variance for one in moments])
        mean, variance = means.median(0).values, variances.nanmedian(0).values
        scale = variance + eps.get(path, NO_VARIANCE)
        rows += [(means - mean) / scale.sqrt(), (variances - variance) / scale]
    # A single value has no variance: nothing speaks against the usual one.
    return _distances(torch.cat(rows, 1).nan_to_num(0), groups.owner)


def _distances(rows: Tensor, owner: Tensor) -> Compared:
    """Return the clients compared by how far their mean row is from the usual one."""
    with needs_package("scipy", "comparisons of the clients' inputs"):
        from scipy.stats import rankdata
    sizes = torch.bincount(owner)
    share = nn.functional.one_hot(owner).T / sizes[:, None].double()

    def far(share: Tensor, rows: Tensor) -> Tensor:
        means = share @ rows
        return (means - means.median(0).values).pow(_POWER).mean(1).pow(1 / _POWER)

    # Normal values of the same ranks: no column has a long tail. Equal values have
    # equal ranks, and differences below a thousandth are rounding.
    ranks = torch.from_numpy(rankdata(rows.round(decimals=3).numpy(), axis=0))
    scores = torch.special.ndtri((ranks - 0.5) / len(rows))
    found = far(share, scores)
    generator, dealt = torch.Generator().manual_seed(0), []
    for _ in range(RE_SPLITS):
        order = torch.randperm(len(rows), generator=generator)
        dealt.append(far(share[:, order], scores))
    chance = torch.stack(dealt)
    by_chance = found * sizes.sqrt() > (chance * sizes.sqrt()).max()

    # By design d is alike: what is left of it above that of random re-splits.
    by_design = _among_designed(found - chance.mean(0))
    compared = torch.where(by_chance, by_design, by_design.clamp(max=0))
    return _compared(far(share, rows), compared)


def distinct_share(inputs: Tensor) -> float:
    """Return how many of the examples differ, as a share of all."""
    # Hashes: the examples themselves may be large.
    seen = {hash(one.double().numpy().tobytes()) for one in inputs}
    return len(seen) / len(inputs)


def below_median(values: Sequence[float], sizes: Sequence[int]) -> Compared:
    """Return how far each client's share of examples is below the median.

    Args:
        values: the share of each client's examples, that it predicts well say.
        sizes: each client's examples.
    """
    shares = torch.tensor(values, dtype=torch.float64)
    count = torch.tensor(sizes, dtype=torch.float64)
    # Two examples more of either kind: never 0 or 1, so that the binomial standard
    # error of few examples is not 0 (Agresti & Coull 1998).
    usual = (shares.median() * count + 2) / (count + 4)
    error = (usual * (1 - usual) / count).sqrt()
    below = shares.median() - shares
    return _compared(below, stand_out(below, error))

"""Comparison of each client with the others in several measures.

The measures are inputs, classes, repeated examples and accuracy. A federation may
differ in all clients, or one client may differ from all others. Therefore each measure
is compared with its median over the clients, in units of their spread. The spread is
the median absolute deviation, so two odd clients of five do not change it. It is never
less than the sampling error. A client stands out if chance gives such a high score, to
any client in any measure, in at most one of 500 federations (Bonferroni).

A distance d of a client with n examples is compared in two ways, and the client must
stand out in both. If the clients differ only by chance, n d^2 is similar for all, so a
small client is not odd because of its noise. If the clients differ by design, d is
similar for all, so a large client is not odd because of its precision.

For inputs, chance is measured by random re-splits, because their columns have long
tails in many tables. The same groups of examples are dealt to the clients at random, in
500 federations. A client stands out if it is further than every client of all of them.
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

# Share of the significance level for the comparison of class mixes. It is high, because
# counts of few examples are weak evidence.
_SHARE_OF_CLASSES = 0.5
# Number of the other measures (inputs, distinct examples, accuracy). They share the
# rest of the level.
_OTHERS = 3


# Exponent of the mean over columns. With it, one distant column counts as much as many
# nearer columns.
_POWER = 8


@dataclass(frozen=True)
class Compared:
    """One measure of all clients.

    Attributes:
        values: the measure of each client, (K,).
        scores: each client's distance from the median in units of the spread, (K,);
            positive is worse.
        odd: indices of the clients that stand out, even if the difference is small.
    """

    values: list[float]
    scores: list[float]
    odd: list[int]


@dataclass(frozen=True)
class EachClient:
    """The measures of each client against the others. None means not measured.

    Attributes:
        mix: total variation distance of a client's class mix from the mix of all
            others.
        inputs: distance of the inputs of BatchNorm and of the model from the usual
            inputs, in standard deviations. It is a power mean over layers and channels,
            so the largest deviations dominate.
        repeated: the median share of distinct examples minus the client's share.
        below: the median accuracy minus the client's accuracy.
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
        """The clients whose inputs look different without a known cause."""
        known = {*self.other_mix, *self.repeating}
        return [k for k in _large(self.inputs, MIN_SHIFT) if k not in known]

    @property
    def repeating(self) -> list[int]:
        """The clients whose examples are repeated."""
        return _large(self.repeated, MIN_REPEATED)

    @property
    def worse(self) -> list[int]:
        """The clients far below the others in accuracy without a known cause."""
        return [k for k in _large(self.below, MIN_BELOW) if k not in self.apart]

    @property
    def apart(self) -> list[int]:
        """The clients that stand out in their inputs, classes or repeated examples.

        Findings about all clients leave these clients out.
        """
        return sorted({*self.other_inputs, *self.other_mix, *self.repeating})


def _large(compared: Compared | None, least: float) -> list[int]:
    """Return the odd clients whose difference is large enough to matter."""
    if compared is None:
        return []
    return [k for k in compared.odd if compared.values[k] >= least]


def stand_out(values: Tensor, errors: Tensor) -> Tensor:
    """Return each client's score, a unitless distance from the median, (K,).

    The unit is the spread of all clients, or the client's error if that is larger. The
    factor turns the median absolute deviation of K normal values into a standard
    deviation (Croux & Rousseeuw 1992).
    """
    centred = values - values.median()
    spread = 1.4826 * len(values) / (len(values) - 0.8) * centred.abs().median()
    return centred / torch.maximum(errors, spread).clamp(min=1e-12)


def _bound(clients: int, share: float) -> float:
    """Return the score above which a client stands out in a measure.

    Chance makes any of the clients exceed this score in at most the share ``LEVEL *
    share`` of all federations (Bonferroni).
    """
    return NormalDist().inv_cdf(1 - LEVEL * share / clients)


def _compared(values: Tensor, scores: Tensor) -> Compared:
    bound = _bound(len(values), (1 - _SHARE_OF_CLASSES) / _OTHERS)
    odd = torch.nonzero(scores > bound).flatten()
    return Compared(values.tolist(), scores.tolist(), odd.tolist())


def class_mixes(counts: Tensor) -> Compared:
    """Return each client's class mix compared with the others, given counts (K, C).

    A client stands out by two tests: the chi-square test of its counts against the
    counts of all others, and the test of its distance among the distances of the
    others. The skew is by design if more than a fifth of the clients stand out (in
    small federations more than two), or if the others differ as well. Then no client is
    odd.
    """
    distances, tails = [], []
    for own in counts:
        pair = torch.stack([own, counts.sum(0) - own])
        shares = pair / pair.sum(1, keepdim=True)
        distances.append((shares[0] - shares[1]).abs().sum() / 2)
        tails.append(class_skew(pair).p_value)
    far = torch.stack(distances)
    # Convert the p value to a normal score, comparable with the other score.
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
    # If many clients are odd, or if the other clients differ as well, the label skew is
    # by design, and no client is odd.
    if odd and (len(odd) > max(2, len(counts) // 5) or class_skew(counts[rest]).counts):
        odd = []
    return Compared(far.tolist(), scores.tolist(), odd)


def _among_designed(distances: Tensor) -> Tensor:
    """Return scores of distances, in a federation with differences by design.

    The error of a distance is a quarter of the median distance.
    """
    return stand_out(distances, distances.median().expand_as(distances) / 4)


def statistics(groups: Groups, eps: Mapping[str, float]) -> Compared:
    """Return how far each client's inputs are from the usual inputs.

    These are the inputs of BatchNorm and of the model. The usual mean and variance are
    medians, so an odd client does not change them. ``eps`` has the eps of each layer.
    """
    rows = []
    for path, moments in {"": groups.inputs, **groups.layers}.items():
        means = torch.stack([one.mean for one in moments])
        variances = torch.stack([one.variance for one in moments])
        mean, variance = means.median(0).values, variances.nanmedian(0).values
        scale = variance + eps.get(path, NO_VARIANCE)
        rows += [(means - mean) / scale.sqrt(), (variances - variance) / scale]
    # The variance of a single value is NaN. Replace it by 0, which stands for the usual
    # variance.
    return _distances(torch.cat(rows, 1).nan_to_num(0), groups.owner)


def _distances(rows: Tensor, owner: Tensor) -> Compared:
    """Compare the clients by the distance of their mean row from the usual row."""
    with needs_package("scipy", "comparisons of the clients' inputs"):
        from scipy.stats import rankdata
    sizes = torch.bincount(owner)
    share = nn.functional.one_hot(owner).T / sizes[:, None].double()

    def far(share: Tensor, rows: Tensor) -> Tensor:
        means = share @ rows
        return (means - means.median(0).values).pow(_POWER).mean(1).pow(1 / _POWER)

    # Replace values by normal values of the same ranks, so no column has a long tail.
    # Equal values have equal ranks; differences below a thousandth are rounding errors.
    ranks = torch.from_numpy(rankdata(rows.round(decimals=3).numpy(), axis=0))
    scores = torch.special.ndtri((ranks - 0.5) / len(rows))
    found = far(share, scores)
    generator, dealt = torch.Generator().manual_seed(0), []
    for _ in range(RE_SPLITS):
        order = torch.randperm(len(rows), generator=generator)
        dealt.append(far(share[:, order], scores))
    chance = torch.stack(dealt)
    by_chance = found * sizes.sqrt() > (chance * sizes.sqrt()).max()

    # In a federation with label skew by design, the distances are similar. So compare
    # the excess of each distance over its mean in random re-splits.
    by_design = _among_designed(found - chance.mean(0))
    compared = torch.where(by_chance, by_design, by_design.clamp(max=0))
    return _compared(far(share, rows), compared)


def distinct_share(inputs: Tensor) -> float:
    """Return the share of distinct examples among all examples."""
    # Compare hashes, because the examples themselves may be large.
    seen = {hash(one.double().numpy().tobytes()) for one in inputs}
    return len(seen) / len(inputs)


def below_median(values: Sequence[float], sizes: Sequence[int]) -> Compared:
    """Return how far each client's share is below the median share.

    Args:
        values: a share of each client's examples, such as its accuracy.
        sizes: number of each client's examples.
    """
    shares = torch.tensor(values, dtype=torch.float64)
    count = torch.tensor(sizes, dtype=torch.float64)
    # Add two examples of either kind, so the share is never 0 or 1 and the binomial
    # standard error of few examples is not 0 (Agresti & Coull 1998).
    usual = (shares.median() * count + 2) / (count + 4)
    error = (usual * (1 - usual) / count).sqrt()
    below = shares.median() - shares
    return _compared(below, stand_out(below, error))

"""Differences between clients, in their classes and in the inputs of BatchNorm.

A model in eval mode processes small groups of each client's examples, drawn at random.
In each group, the inputs of every BatchNorm layer have a mean and a variance. An
analysis of variance compares their differences between clients with their differences
within clients. The noise of few examples is in both. The channels are not independent.
Therefore both sums of squares count only the number of independent channels (Box 1954),
tr(S)^2 / tr(S^2) with the covariance S within the clients.

The classes are compared by the chi-square test of their counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.reestimation import Moments
from fedbn_flwr.doctor.by_batch import moments_seen, pooled
from fedbn_flwr.doctor.clients import ClientExamples
from fedbn_flwr.doctor.thresholds import CERTAIN, GROUPS, MIN_SHIFT, MIN_SKEW
from fedbn_flwr.errors import DataError, needs_package
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.copying import copied
from fedbn_flwr.training.freezing import layers_of

__all__ = [
    "ClassSkew",
    "Groups",
    "Shift",
    "class_counts",
    "class_skew",
    "degrees",
    "group_means",
    "groups_of",
    "shift",
    "total_variation",
    "units",
]

Layers = Mapping[str, Sequence[Moments]]
"""The moments of a layer's inputs in each group, by path of the layer."""


class Groups(NamedTuple):
    """Inputs of BatchNorm in groups of examples.

    Attributes:
        layers: moments by path, without layers that were not called in every group.
        owner: index of each group's client, (R,).
    """

    layers: Layers
    owner: Tensor


@dataclass(frozen=True)
class ClassSkew:
    """Differences between the clients' classes.

    Attributes:
        distances: total variation distance of each client's class mix from the mix of
            all clients, in [0, 1].
        by_chance: the average distance that chance would cause.
        p_value: p value of the chi-square test.
    """

    distances: list[float]
    by_chance: float
    p_value: float

    @property
    def mean(self) -> float:
        """The average of ``distances`` over the clients."""
        return sum(self.distances) / len(self.distances)

    @property
    def counts(self) -> bool:
        """Whether the skew is certain, and at least ``MIN_SKEW`` above chance."""
        return self.p_value <= CERTAIN and self.mean - self.by_chance >= MIN_SKEW


@dataclass(frozen=True)
class Shift:
    """Differences between clients in the inputs of BatchNorm.

    Attributes:
        layers: by path, the deviation of a client's statistics from the statistics of
            all clients, as root mean square over clients and channels. Deviations of
            means are in standard deviations. Deviations of variances are relative to
            the variance of all clients.
        by_chance: the values of ``layers`` if clients differ only by chance.
        excess: the deviation above chance over all layers, sqrt(mean square - mean
            square by chance).
        p_value: p value of the analysis of variance over all layers.
        distances: the root mean square of each client's deviation, over layers and
            channels.
    """

    layers: dict[str, float]
    by_chance: dict[str, float]
    excess: float
    p_value: float
    distances: Sequence[float] = ()

    @property
    def worst(self) -> str:
        """The layer whose deviation is furthest above the deviation by chance."""
        return max(
            self.layers,
            key=lambda path: self.layers[path] ** 2 - self.by_chance[path] ** 2,
        )

    @property
    def counts(self) -> bool:
        """Whether the clients differ beyond chance, and enough to cause harm."""
        return self.p_value <= CERTAIN and self.excess >= MIN_SHIFT


def groups_of(
    model: nn.Module, clients: Sequence[ClientExamples], generator: torch.Generator
) -> Groups:
    """Return the moments of BatchNorm's inputs in groups of examples.

    The model does not change. All groups have nearly the same size. A group has at
    least two examples if its client has two, because layers without running statistics
    need two.
    """
    working = copied(model).eval()
    layers, prepared = layers_of(working), inputs_for(working)
    # Limit the number of groups, so that a large federation does not cost a pass per
    # example.
    total = sum(map(len, clients))
    size = max(2, math.ceil(total / GROUPS))
    seen: dict[str, list[Moments]] = {path: [] for path in layers}
    owner = []
    with torch.no_grad():
        for k, client in enumerate(clients):
            # Shuffle the examples. If a loader is sorted, the neighbours in a group
            # would differ too little.
            order = torch.randperm(len(client), generator=generator)
            for places in order.tensor_split(max(1, len(client) // size)):
                owner.append(k)
                inputs = prepared(client.inputs[places])
                for path, moments in moments_seen(working, layers, inputs).items():
                    seen[path].append(moments)
    # The analysis needs a row from every group, so leave out layers that were not
    # called in every group.
    called = {path: rows for path, rows in seen.items() if len(rows) == len(owner)}
    return Groups(called, torch.tensor(owner))


def units(
    groups: Sequence[Moments], eps: float, mean: Tensor, variance: Tensor
) -> Tensor:
    """Return unitless distances of the groups from a mean and a variance, (R, 2 C).

    The first C columns are (mu - mean) / sqrt(variance + eps). The others are the same
    for the mean square about ``mean``: (var + (mu - mean)^2 - variance) / (variance +
    eps).
    """
    means = torch.stack([one.mean for one in groups])
    within = torch.stack([one.m2 / one.count for one in groups])
    scale = variance + eps
    apart = means - mean
    of_variance = (within + apart.square() - variance) / scale
    return torch.cat([apart / scale.sqrt(), of_variance], 1)


def group_means(rows: Tensor, groups: Tensor) -> Tensor:
    """Return the mean row of each group, given rows (N, D) and their groups (N,)."""
    sums = rows.new_zeros((int(groups.max()) + 1, rows.shape[1]))
    sums.index_add_(0, groups, rows)
    sizes = torch.bincount(groups).clamp(min=1)
    return sums / sizes[:, None].to(rows.dtype)


def shift(groups: Groups, eps: Mapping[str, float]) -> Shift:
    """Return the differences between clients in BatchNorm's inputs.

    ``eps`` has the eps of each layer.

    Raises:
        DataError: inputs are not finite, or there are too few groups to estimate the
            differences within the clients.
        ConfigError: scipy is not installed.
    """
    rows, owner = {}, groups.owner
    for path, moments in groups.layers.items():
        together = pooled(moments)
        rows[path] = units(moments, eps[path], together.mean, together.variance)
    table = torch.cat(list(rows.values()), 1)
    if not bool(table.isfinite().all()):
        raise DataError(
            "inputs of BatchNorm are not finite. Look for NaN and infinity in the"
            " weights and the inputs."
        )
    # One test over all layers decides; the tests of single layers locate the shift.
    overall = _Analysis.of(table, owner)
    observed, chance = {}, {}
    for path, part in rows.items():
        of_layer = _Analysis.of(part, owner)
        observed[path] = math.sqrt(of_layer.between)
        chance[path] = math.sqrt(of_layer.chance)
    excess = math.sqrt(max(0.0, overall.between - overall.chance))
    distances = group_means(table, owner).square().mean(1).sqrt().tolist()
    return Shift(observed, chance, excess, overall.p_value, distances)


@dataclass(frozen=True)
class _Analysis:
    """An analysis of variance of unitless rows, averaged over their columns.

    Attributes:
        between: mean square of the distance of the clients' mean rows from the mean of
            all rows.
        chance: the expected ``between`` if there is only noise within the clients.
        p_value: p value of the F test.
    """

    between: float
    chance: float
    p_value: float

    @classmethod
    def of(cls, rows: Tensor, owner: Tensor) -> _Analysis:
        """Return the analysis of rows (R, D), given the client of each row."""
        sizes = torch.bincount(owner).double()
        free = len(rows) - len(sizes)
        if free < 1:
            raise DataError(
                f"{len(rows)} groups of examples from {len(sizes)} clients are too few"
                " for a test. Use more examples."
            )
        means = group_means(rows, owner)
        left = rows - means[owner]
        apart = means - rows.mean(0)
        between = float((sizes / len(rows)) @ apart.square().mean(1))
        # ``within`` is the variance of one row within its client, and ``chance`` is the
        # share of ``between`` that it explains.
        within = float(left.square().sum()) / free / rows.shape[1]
        chance = within * (len(sizes) - 1) / len(rows)
        # Columns depend on each other, so use the number of independent columns (Box
        # 1954).
        independent = degrees(left, free)
        with needs_package("scipy", "comparisons of the clients' statistics"):
            from scipy.stats import f
        # If the rows of each client are equal, ``chance`` is 0: avoid a division by 0,
        # and let any difference be certain.
        ratio = between / max(chance, 1e-300)
        p_value = f.sf(ratio, independent * (len(sizes) - 1), independent * free)
        return cls(between, chance, float(p_value))


def degrees(left: Tensor, free: int) -> float:
    """Return the number of independent columns of rows (R, D).

    The number is tr(S)^2 / tr(S^2), with the covariance S of the columns.

    Args:
        left: the rows without the mean of their client.
        free: degrees of freedom of the rows.
    """
    # left @ left.T, (R, R), has the same traces and is much smaller than S, (D, D).
    products = left @ left.T / free
    trace = products.trace()
    # With few rows, tr(S^2) is too large. For normal values, the excess is tr(S)^2 /
    # free.
    squared = products.square().sum() - trace.square() / free
    columns = float(left.shape[1])
    found = columns
    if squared > 0:
        found = float(trace.square() / squared)
    return min(max(found, 1.0), columns)


def class_counts(classes: Tensor, owner: Tensor) -> Tensor:
    """Return the number of each client's examples in each class, float64 (K, C).

    Args:
        classes: the class of each example.
        owner: the client of each example.
    """
    _, known = torch.unique(classes, return_inverse=True)
    clients, width = int(owner.max()) + 1, int(known.max()) + 1
    cells = torch.bincount(owner * width + known, minlength=clients * width)
    return cells.view(clients, width).double()


def total_variation(counts: Tensor) -> Tensor:
    """Return 1/2 sum_c abs(p_kc - p_c) for each client, (K,), given counts (K, C)."""
    shares = counts / counts.sum(1, keepdim=True)
    of_all = counts.sum(0) / counts.sum()
    return (shares - of_all).abs().sum(1) / 2


def class_skew(counts: Tensor) -> ClassSkew:
    """Return the differences between the clients' classes, given counts (K, C).

    Raises:
        ConfigError: scipy is not installed.
    """
    with needs_package("scipy", "comparisons of the clients' classes"):
        from scipy.stats import chi2_contingency
    # Leave out classes without examples, because the chi-square test cannot compute an
    # expected count for them.
    counts = counts[:, counts.sum(0) > 0]
    sizes, total = counts.sum(1), counts.sum()
    shares = counts.sum(0) / total
    # Shares deviate by chance. For nearly normal counts, the mean absolute deviation is
    # sqrt(2 / pi) standard deviations. The n_k examples of a client count as draws
    # without replacement from all examples.
    spread = (2 / math.pi * shares * (1 - shares)).sqrt().sum() / 2
    by_chance = (spread * (1 / sizes - 1 / total).clamp(min=0).sqrt()).mean()
    p_value = 1.0
    if counts.shape[1] > 1:
        p_value = float(chi2_contingency(counts.numpy()).pvalue)
    return ClassSkew(total_variation(counts).tolist(), float(by_chance), p_value)

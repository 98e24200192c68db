"""How the clients differ: in their classes, and in what BatchNorm sees of examples.

A model in eval mode reads small groups of each client's examples, drawn at random. The
inputs of every BatchNorm layer have a mean and a variance in each group. An analysis of
variance compares how these differ between the clients with how they differ within them:
the noise of few examples is in both. The channels are not independent, so both sums of
squares count only as many of them as are (Box 1954): tr(S)^2 / tr(S^2) with the
covariance S within the clients.

The classes are compared by the chi-square test of their counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.reestimation import Moments, moments_of
from fedbn_flwr.doctor.by_batch import moments_seen, pooled
from fedbn_flwr.doctor.clients import ClientData
from fedbn_flwr.doctor.thresholds import CERTAIN, GROUPS, MIN_SHIFT, MIN_SKEW
from fedbn_flwr.errors import DataError, needs_package
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import copied

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
"""By path, the moments of a layer's inputs in each group."""


class Groups(NamedTuple):
    """What BatchNorm sees of groups of examples.

    Attributes:
        layers: by path; a layer that is not called in every group is left out.
        owner: index of each group's client, (R,).
        inputs: the moments of the model's own inputs in each group.
    """

    layers: Layers
    owner: Tensor
    inputs: Sequence[Moments] = ()

    def of(self, clients: Sequence[int]) -> Groups:
        """Return the groups of these clients, which are numbered anew."""
        chosen = torch.isin(self.owner, torch.tensor(clients))
        places = torch.nonzero(chosen).flatten().tolist()
        layers = {}
        for path, moments in self.layers.items():
            layers[path] = [moments[at] for at in places]
        _, owner = torch.unique(self.owner[chosen], return_inverse=True)
        return Groups(layers, owner)


@dataclass(frozen=True)
class ClassSkew:
    """How the clients' classes differ.

    Attributes:
        distances: total variation distance of each client's class mix from that of all,
            in [0, 1].
        by_chance: what the average distance is by chance.
        p_value: of the chi-square test.
    """

    distances: list[float]
    by_chance: float
    p_value: float

    @property
    def mean(self) -> float:
        """The average over the clients."""
        return sum(self.distances) / len(self.distances)

    @property
    def counts(self) -> bool:
        """Whether classes are skewed: beyond chance, and by a tenth of the labels."""
        return self.p_value <= CERTAIN and self.mean - self.by_chance >= MIN_SKEW


@dataclass(frozen=True)
class Shift:
    """How the inputs of BatchNorm differ between clients.

    Attributes:
        layers: by path, the root mean square over clients and channels of the deviation
            of a client's statistics from those of all: the mean in standard deviations,
            and the variance relative to itself.
        by_chance: the same for clients that differ by chance alone.
        excess: of all layers together, what is above chance: sqrt(mean square - mean
            square by chance).
        p_value: of the analysis of variance over all layers.
        distances: of each client the root mean square over layers and channels of its
            deviation.
    """

    layers: dict[str, float]
    by_chance: dict[str, float]
    excess: float
    p_value: float
    distances: Sequence[float] = ()

    @property
    def worst(self) -> str:
        """The layer that is furthest above chance."""
        return max(
            self.layers,
            key=lambda path: self.layers[path] ** 2 - self.by_chance[path] ** 2,
        )

    @property
    def counts(self) -> bool:
        """Whether the clients differ: beyond chance, and so much that it harms."""
        return self.p_value <= CERTAIN and self.excess >= MIN_SHIFT


def groups_of(
    model: nn.Module, clients: Sequence[ClientData], generator: torch.Generator
) -> Groups:
    """Return what BatchNorm sees of groups of examples; the model does not change.

    All groups have nearly the same size, two examples or more: a client without running
    statistics needs them.
    """
    working = copied(model).eval()
    layers, prepared = layers_of(working), inputs_for(working)
    # So few groups that a large federation does not cost a pass an example.
    total = sum(map(len, clients))
    size = max(2, math.ceil(total / GROUPS))
    seen: dict[str, list[Moments]] = {path: [] for path in layers}
    owner, of_inputs = [], []
    with torch.no_grad():
        for k, client in enumerate(clients):
            # A loader may be sorted: neighbours in a group would differ too little.
            order = torch.randperm(len(client), generator=generator)
            for places in order.tensor_split(max(1, len(client) // size)):
                owner.append(k)
                inputs = prepared(client.inputs[places])
                of_inputs.append(moments_of(client.inputs[places].unsqueeze(-1)))
                for path, moments in moments_seen(working, layers, inputs).items():
                    seen[path].append(moments)
    # The analysis needs a row of every group: a layer that was skipped once goes.
    called = {path: rows for path, rows in seen.items() if len(rows) == len(owner)}
    return Groups(called, torch.tensor(owner), of_inputs)


def units(
    groups: Sequence[Moments], eps: float, mean: Tensor, variance: Tensor
) -> Tensor:
    """Return each group's distance from a mean and a variance without units, (R, 2 C).

    The first C columns are (mu - mean) / sqrt(variance + eps), the others the same of
    the mean square about ``mean``: (var + (mu - mean)^2 - variance) / (variance + eps).
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
    """Return how the inputs of BatchNorm differ between clients, given eps of each
    layer.

    Raises:
        DataError: inputs are not finite, or there are too few groups to see how they
            differ within the clients.
    """
    rows, owner = {}, groups.owner
    for path, moments in groups.layers.items():
        together = pooled(moments)
        rows[path] = units(moments, eps[path], together.mean, together.variance)
    table = torch.cat(list(rows.values()), 1)
    if not bool(table.isfinite().all()):
        raise DataError(
            "inputs of BatchNorm are not finite. Look for NaN and infinity in weights"
            " and inputs."
        )
    # One test over all layers decides; those of single layers say where to look.
    whole = _Analysis.of(table, owner)
    observed, chance = {}, {}
    for path, part in rows.items():
        of_layer = _Analysis.of(part, owner)
        observed[path] = math.sqrt(of_layer.between)
        chance[path] = math.sqrt(of_layer.chance)
    excess = math.sqrt(max(0.0, whole.between - whole.chance))
    distances = group_means(table, owner).square().mean(1).sqrt().tolist()
    return Shift(observed, chance, excess, whole.p_value, distances)


@dataclass(frozen=True)
class _Analysis:
    """An analysis of variance of rows without units, averaged over their columns.

    Attributes:
        between: mean square of the clients' mean rows from that of all.
        chance: what the noise within the clients makes of it.
        p_value: of the F test.
    """

    between: float
    chance: float
    p_value: float

    @classmethod
    def of(cls, rows: Tensor, owner: Tensor) -> _Analysis:
        """Return the analysis of rows (R, D), given the client of each."""
        sizes = torch.bincount(owner).double()
        free = len(rows) - len(sizes)
        if free < 1:
            raise DataError(
                f"{len(rows)} groups of examples of {len(sizes)} clients are too few"
                " for a test."
            )
        means = group_means(rows, owner)
        left = rows - means[owner]
        apart = means - rows.mean(0)
        between = float((sizes / len(rows)) @ apart.square().mean(1))
        # The variance of one row within its client, and what it adds to ``between``.
        within = float(left.square().sum()) / free / rows.shape[1]
        chance = within * (len(sizes) - 1) / len(rows)
        # Columns depend on each other: as many count as are independent (Box 1954).
        independent = degrees(left, free)
        with needs_package("scipy", "comparisons of the clients' statistics"):
            from scipy.stats import f
        # Rows that are equal within each client have no noise: certain, not an error.
        ratio = between / max(chance, 1e-300)
        p_value = f.sf(ratio, independent * (len(sizes) - 1), independent * free)
        return cls(between, chance, float(p_value))


def degrees(left: Tensor, free: int) -> float:
    """Return how many of the columns of (R, D) are independent.

    It is tr(S)^2 / tr(S^2), with the covariance S of the columns.

    Args:
        left: the rows without the mean of their client.
        free: degrees of freedom of the rows.
    """
    # Both traces are those of left @ left.T, (R, R), which is small beside S, (D, D).
    products = left @ left.T / free
    trace = products.trace()
    # Of few rows tr(S^2) is too large, by tr(S)^2 / free for normal values.
    squared = products.square().sum() - trace.square() / free
    columns = float(left.shape[1])
    found = columns
    if squared > 0:
        found = float(trace.square() / squared)
    return min(max(found, 1.0), columns)


def class_counts(classes: Tensor, owner: Tensor) -> Tensor:
    """Return the examples of each client in each class, float64 (K, C).

    Args:
        classes: the class of each example.
        owner: the client of each example.
    """
    _, known = torch.unique(classes, return_inverse=True)
    clients, width = int(owner.max()) + 1, int(known.max()) + 1
    cells = torch.bincount(owner * width + known, minlength=clients * width)
    return cells.view(clients, width).double()


def total_variation(counts: Tensor) -> Tensor:
    """Return 1/2 sum_c abs(p_kc - p_c) of each client, (K,), given counts (K, C)."""
    shares = counts / counts.sum(1, keepdim=True)
    of_all = counts.sum(0) / counts.sum()
    return (shares - of_all).abs().sum(1) / 2


def class_skew(counts: Tensor) -> ClassSkew:
    """Return how the clients' classes differ, given the examples in each, (K, C).

    Raises:
        ConfigError: scipy is not installed.
    """
    with needs_package("scipy", "comparisons of the clients' classes"):
        from scipy.stats import chi2_contingency
    # The chi-square test has no expectation for a class without examples.
    counts = counts[:, counts.sum(0) > 0]
    sizes, total = counts.sum(1), counts.sum()
    shares = counts.sum(0) / total
    # The mean absolute deviation of a share by chance, of nearly normal counts:
    # sqrt(2 / pi) standard deviations, of n_k draws without replacement from all.
    spread = (2 / math.pi * shares * (1 - shares)).sqrt().sum() / 2
    by_chance = (spread * (1 / sizes - 1 / total).clamp(min=0).sqrt()).mean()
    p_value = 1.0
    if counts.shape[1] > 1:
        p_value = float(chi2_contingency(counts.numpy()).pvalue)
    return ClassSkew(total_variation(counts).tolist(), float(by_chance), p_value)

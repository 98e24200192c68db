"""How the clients differ: in their classes, and in what BatchNorm sees of their examples.

Every question is asked against chance. Examples are regrouped into clients of the same sizes at random, 199 times, and
999 times if no regrouping reaches the difference that was found: then p = 1 / 1000. So the noise of small clients,
which shrinks as 1 / sqrt(n), is in the comparison, and no threshold depends on it.

Two ways to regroup tell two causes apart. Regrouping *all* examples breaks every tie between client and example.
Regrouping *within each class* keeps each client's classes: what still differs is how the same class looks at different
clients, a feature shift. A class that one client has, all but a few examples, says nothing about that: it is compared
with itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbn_flwr.doctor.by_example import LayerFeatures
from fedbn_flwr.doctor.thresholds import MIN_SKEW, REGROUPINGS
from fedbn_flwr.machine import threads

__all__ = [
    "ClassSkew",
    "Shift",
    "certain",
    "class_skew",
    "overlap",
    "regroupings",
    "shift",
    "shuffled",
    "total_variation",
    "units",
]


@dataclass(frozen=True)
class ClassSkew:
    """How the clients' classes differ.

    Attributes:
        distances: total variation distance of each client's class mix from that of all, in [0, 1].
        by_chance: the mean of the average distance over the regroupings.
        p_value: share of the regroupings with an average as large, the data among them.
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
        """Whether the classes are skewed: beyond chance, and by a tenth of the labels."""
        return certain(self.p_value) and self.mean - self.by_chance >= MIN_SKEW


@dataclass(frozen=True)
class Shift:
    """How the inputs of BatchNorm differ between clients.

    Attributes:
        layers: by path, the root mean square over clients and channels of the deviation of a client's statistics from
            those of all: the mean in standard deviations, and the variance relative to itself.
        by_chance: the same under regrouping, the root of the mean square.
        excess: of all layers together, what is above chance: sqrt(mean square - mean square by chance).
        p_value: share of the regroupings with a mean square as large, the data among them.
        peak_p_value: share of the regroupings in which any layer is as far above its chance as the worst one is here.
        share: how much the clients' classes overlap, see ``overlap``; 1 where classes are not held fixed.
        distances: of each client the root mean square over layers and channels of its deviation.
    """

    layers: dict[str, float]
    by_chance: dict[str, float]
    excess: float
    p_value: float
    peak_p_value: float
    share: float = 1.0
    distances: Sequence[float] = ()

    @property
    def worst(self) -> str:
        """The layer that is furthest above chance."""
        return max(self.layers, key=lambda path: self.layers[path] ** 2 - self.by_chance[path] ** 2)

    def excess_in(self, path: str) -> float:
        """Return what is above chance in one layer; a mean over many layers hides it."""
        return math.sqrt(max(0.0, self.layers[path] ** 2 - self.by_chance[path] ** 2))


def certain(p_value: float) -> bool:
    """Return whether no regrouping reaches what was found."""
    return p_value <= 1.5 / (1 + REGROUPINGS[1])


def total_variation(counts: Tensor) -> Tensor:
    """Return 1/2 sum_c abs(p_kc - p_c) of each client, (K,), given the examples by client and class, (K, classes)."""
    shares = counts / counts.sum(1, keepdim=True)
    return (shares - counts.sum(0) / counts.sum()).abs().sum(1) / 2


def class_skew(classes: Tensor, owner: Tensor, generator: torch.Generator) -> ClassSkew:
    """Return how the clients' classes differ, given class and client of each example, (N,)."""
    _, known = torch.unique(classes, return_inverse=True)
    clients, width = int(owner.max()) + 1, int(known.max()) + 1

    def measured(order: Tensor) -> Tensor:
        return total_variation(torch.bincount(order * width + known, minlength=clients * width).view(clients, width))

    skews = measured(owner)
    chance = _chance(skews.mean()[None], lambda: measured(shuffled(owner, None, generator)).mean()[None])
    return ClassSkew(skews.tolist(), float(chance.mean()), _p_values(skews.mean()[None], chance)[0])


def units(layer: LayerFeatures, eps: float) -> Tensor:
    """Return each example's share in the layer's statistics without units, (N, 2 D).

    The first D columns are (x_n - mu) / sqrt(var + eps), the others ((x_n - mu)^2 - var) / (var + eps), both averaged
    over the positions of the example. Their averages over a client are its deviation in mean and in variance.
    """
    first, second = layer.first.double(), layer.second.double()
    mean = first.mean(0)
    square = second - 2 * first * mean + mean.square()
    variance = square.mean(0)
    scale = variance + eps
    return torch.cat([(first - mean) / scale.sqrt(), (square - variance) / scale], 1)


def shift(
    layers: Mapping[str, LayerFeatures],
    owner: Tensor,
    eps: Mapping[str, float],
    generator: torch.Generator,
    classes: Tensor | None = None,
) -> Shift:
    """Return how the inputs of BatchNorm differ between clients; with ``classes``, within each class.

    Args:
        layers: by path.
        owner: the client of each example, (N,).
        eps: of each layer.
        generator: of the regroupings.
        classes: class of each example, (N,); None = all examples are regrouped.
    """
    rows = {path: units(layer, eps[path]) for path, layer in layers.items()}
    share = 1.0
    if classes is not None:
        rows = {path: _without_class_means(values, classes) for path, values in rows.items()}
        share = overlap(classes, owner)
    table, widths = torch.cat(list(rows.values()), 1).float(), [values.shape[1] for values in rows.values()]
    clients = int(owner.max()) + 1

    def means_of(order: Tensor) -> tuple[Tensor, Tensor]:
        members = torch.nn.functional.one_hot(order, clients).T.float()
        sizes = members.sum(1, keepdim=True)
        return (members @ table) / sizes.clamp(min=1), sizes

    def squares(order: Tensor) -> Tensor:
        means, sizes = means_of(order)
        scaled = (sizes / len(order)).sqrt() * means
        return torch.stack([part.square().mean() for part in torch.split(scaled, widths, 1)])

    observed = squares(owner) * clients
    chance = _chance(observed, lambda: squares(shuffled(owner, classes, generator)) * clients)
    by_chance = chance.mean(0)
    return Shift(
        dict(zip(rows, observed.sqrt().tolist(), strict=True)),
        dict(zip(rows, by_chance.sqrt().tolist(), strict=True)),
        float((observed.mean() - by_chance.mean()).clamp(min=0).sqrt()),
        *_p_values(observed, chance),
        share,
        means_of(owner)[0].square().mean(1).sqrt().tolist(),
    )


def overlap(classes: Tensor, owner: Tensor) -> float:
    """Return how much the clients' classes overlap: 0 without a shared class, 1 for equal clients with one class mix.

    It is the share of pairs of one class (with repetition) whose examples are of two clients, over 1 - 1 / K, which it
    is for K equal clients. A client with 95 % of a class is compared with itself there, and hardly with others.
    """
    _, known = torch.unique(classes, return_inverse=True)
    clients, width = int(owner.max()) + 1, int(known.max()) + 1
    counts = torch.bincount(known * clients + owner, minlength=clients * width).view(width, clients).double()
    sizes = counts.sum(1)
    between = sizes * (1 - (counts / sizes[:, None]).square().sum(1))
    return float(between.sum() / sizes.sum()) / max(1 - 1 / clients, 0.5)


def shuffled(owner: Tensor, classes: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return the clients of the examples in random order; with ``classes`` each class for itself."""
    if classes is None:
        return owner[torch.randperm(len(owner), generator=generator)]
    # Sorting by class first, then by a random number, gives a random order within each class.
    random = torch.rand(len(owner), generator=generator, dtype=torch.float64)
    mixed, places = torch.argsort(random), torch.argsort(classes, stable=True)
    drawn = torch.empty_like(owner)
    drawn[places] = owner[mixed[torch.argsort(classes[mixed], stable=True)]]
    return drawn


def regroupings(sizes: Sequence[int], most: int) -> int:
    """Return in how many ways, at most ``most``, examples can be dealt to clients of these sizes.

    Clients of one size may change their places: that is no other way.
    """
    ways = math.lgamma(sum(sizes) + 1) - sum(math.lgamma(size + 1) for size in sizes)
    ways -= sum(math.lgamma(clients + 1) for clients in Counter(sizes).values())
    return round(math.exp(min(ways, math.log(most))))


def _without_class_means(values: Tensor, classes: Tensor) -> Tensor:
    """Return the rows (N, D) minus the mean of all rows of their class."""
    _, known = torch.unique(classes, return_inverse=True)
    members = torch.nn.functional.one_hot(known).to(values.dtype)
    return values - members @ ((members.T @ values) / members.sum(0)[:, None])


def _chance(observed: Tensor, draw: Callable[[], Tensor]) -> Tensor:
    """Return the regroupings' values (R, L), given those of the data (L,)."""
    with threads(1):
        rows = [draw() for _ in range(REGROUPINGS[0])]
        if 0 in _reached(observed, torch.stack(rows)):
            rows += [draw() for _ in range(REGROUPINGS[1] - len(rows))]
        return torch.stack(rows)


def _p_values(observed: Tensor, chance: Tensor) -> tuple[float, float]:
    of_mean, of_peak = ((1 + reached) / (1 + len(chance)) for reached in _reached(observed, chance))
    return of_mean, of_peak


def _reached(observed: Tensor, chance: Tensor) -> tuple[int, int]:
    """Return how many regroupings reach the mean over the L, and how many the largest excess of one of the L."""
    usual = chance.mean(0)
    mean, peak = (
        chance.mean(1) < observed.mean() * (1 - 1e-6),
        (chance - usual).amax(1) < (observed - usual).max() * (1 - 1e-6),
    )
    return int((~mean).sum()), int((~peak).sum())  # NaN counts as reached

"""Mean and standard deviation of inputs: the sums of one data set, and the scale that all clients then use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedbn_flwr.training.batches import Batches

__all__ = ["FeatureMoments", "FeatureRanges", "ScalableBatches", "Scale", "scale_of"]


@dataclass(frozen=True, eq=False)
class FeatureMoments:
    """Per channel or feature, float64 (C,): number of values that are not missing, their mean, and ``m2``.

    ``m2`` is the sum of squared deviations from the mean. Pixels are scaled to [0, 1].
    """

    count: Tensor
    mean: Tensor
    m2: Tensor

    def merged(self, other: FeatureMoments) -> FeatureMoments:
        """Return the moments of the union (Chan, Golub, LeVeque 1979)."""
        # `reestimation.merge` does so for many sets at once, with one count; here each feature has its own, which may
        # be 0, and another order of operations would change the bits of the inputs.
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        difference = other.mean - self.mean
        mean = self.mean + difference * share
        return FeatureMoments(count, mean, self.m2 + other.m2 + difference.square() * self.count * share)


@dataclass(frozen=True, slots=True)
class FeatureRanges:
    """The stated range of each feature or channel, in the units of the data: ``low`` < ``high``."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def middle(self) -> Tensor:
        """The middle c of each range, float64 (C,)."""
        return (self._ends[0] + self._ends[1]) / 2

    @property
    def half(self) -> Tensor:
        """Half the width h of each range, float64 (C,)."""
        return (self._ends[1] - self._ends[0]) / 2

    @property
    def _ends(self) -> Tensor:
        return torch.tensor([self.low, self.high], dtype=torch.float64)

    def clipped(self, values: Tensor) -> Tensor:
        """Return values (C, N) with each one inside its range; a NaN stays one."""
        return torch.minimum(torch.maximum(values, self._ends[0][:, None]), self._ends[1][:, None])

    def scale(self) -> Scale:
        """Return the mean and deviation of a uniform distribution over each range: c and h / sqrt(3)."""
        return Scale(tuple(self.middle.tolist()), tuple((self.half / math.sqrt(3)).tolist()))


@dataclass(frozen=True, slots=True)
class Scale:
    """Inputs become (x - mean) / std, per channel or feature."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def to_json(self) -> dict[str, list[float]]:
        """Return JSON values."""
        return {"mean": [*self.mean], "std": [*self.std]}

    @classmethod
    def from_json(cls, values: Mapping[str, Sequence[float]]) -> Scale:
        """Return the scale that ``to_json`` has given, bit for bit."""
        return cls(tuple(values["mean"]), tuple(values["std"]))


def scale_of(moments: FeatureMoments) -> Scale:
    """Return mean and standard deviation (by the count, biased); 1 for a feature that is constant or has no values."""
    std = (moments.m2 / moments.count.clamp(min=1)).sqrt()
    std = torch.where(std > 1e-12 * moments.mean.abs().clamp(min=1e-300), std, torch.ones_like(std))
    return Scale(tuple(moments.mean.tolist()), tuple(std.tolist()))


@runtime_checkable
class ScalableBatches(Batches, Protocol):
    """Batches whose inputs take a mean and std; ``fedbn_flwr.lab.data.Subset`` is one."""

    def input_moments(self, ranges: FeatureRanges | None = None) -> FeatureMoments:
        """Return the sums of the inputs as they are stored, or put into the ranges.

        Raises:
            DataError: the inputs are not in memory.
        """

    def scaled(self, mean: Sequence[float], std: Sequence[float]) -> Batches:
        """Return the same examples with another mean and std."""

"""Mean and standard deviation of inputs, per channel or feature, from training examples alone.

``federated``: the moments (count, mean, sum of squared deviations) of each client's training examples, merged in the
order of the clients, as a server can do with these sums alone. ``local``: each client uses its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.dataset import Dataset
from fedbn_flwr.lab.data.samples import Examples, Samples
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.data.subset import Subset

__all__ = ["FeatureMoments", "Scale", "Standardise", "moments_of_inputs", "scale_of", "standardised"]

Standardise = Literal["", "federated", "local", "none"]
_CHUNK = 4096


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
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        difference = other.mean - self.mean
        mean = self.mean + difference * share
        return FeatureMoments(count, mean, self.m2 + other.m2 + difference.square() * self.count * share)


@dataclass(frozen=True, slots=True)
class Scale:
    """Inputs become (x - mean) / std, per channel or feature."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def moments_of_inputs(samples: Examples, indices: Indices | Tensor) -> FeatureMoments:
    """Return the moments of some examples' inputs; a NaN is missing.

    Raises:
        DataError: the examples are images on the disk.
    """
    if not isinstance(samples, Samples):
        raise DataError(
            "standardise=federated and local read all training examples before round 1; these images stay on the disk. "
            "Leave standardise empty, or give a larger cache-gib."
        )
    channels = samples.shape[0]
    zeros = torch.zeros(channels, dtype=torch.float64)
    total = FeatureMoments(zeros, zeros, zeros)
    for part in torch.split(torch.as_tensor(indices), _CHUNK):
        values = samples.inputs[part.to(samples.device)].cpu().double().transpose(0, 1).flatten(1)
        values = values / 255 if samples.as_bytes else values
        count = (~values.isnan()).sum(1).double()
        mean = values.nan_to_num(0).sum(1) / count.clamp(min=1)
        deviations = (values - mean[:, None]).nan_to_num(0)
        total = total.merged(FeatureMoments(count, mean, deviations.square().sum(1)))
    return total


def scale_of(moments: FeatureMoments) -> Scale:
    """Return mean and standard deviation (by the count, biased); 1 for a feature that is constant or has no values."""
    std = (moments.m2 / moments.count.clamp(min=1)).sqrt()
    std = torch.where(std > 1e-12 * moments.mean.abs().clamp(min=1e-300), std, torch.ones_like(std))
    return Scale(tuple(moments.mean.tolist()), tuple(std.tolist()))


def standardised(
    data: Dataset,
    train: Sequence[Indices],
    test: Sequence[Indices],
    how: Standardise,
    owned: Sequence[Indices] | None = None,
    held_out: Sequence[tuple[Indices, Indices]] = (),
) -> tuple[Dataset, tuple[Scale, ...]]:
    """Return the data with the mean and std of their training examples, and the scale of each client for "local".

    With "federated" the data set's ``mean`` and ``std`` are the federation's. With "local" the inputs themselves are
    standardised, those of no client by the federation's scale, and ``mean`` and ``std`` are () (images: 0 and 1).

    Args:
        data: rows or signals in memory, or images in memory.
        train: training examples of each client.
        test: test examples of each client.
        how: "" = federated for inputs that are no images, the data set's own constants for images.
        owned: training and validation examples of each client; None = ``train``.
        held_out: training and test examples of clients that do not train: no part of the federation's statistics, and
            standardised by their own with "local".

    Raises:
        DataError: the examples are images on the disk, or images with "local".
    """
    how = how or ("none" if data.train.as_bytes else "federated")
    if how == "none":
        return data, ()
    moments = [moments_of_inputs(data.train, part) for part in train]
    whole = scale_of(reduce(FeatureMoments.merged, moments))
    if how == "federated":
        return data.normalised(whole.mean, whole.std), ()
    if data.train.as_bytes:
        raise DataError("standardise=local is for rows and signals; images have one mean and std in all clients.")
    scales = tuple(map(scale_of, moments))
    every = (*scales, *(scale_of(moments_of_inputs(data.train, part)) for part, _ in held_out))
    parts = (
        (data.train, (*(train if owned is None else owned), *(part for part, _ in held_out))),
        (data.test, (*test, *(part for _, part in held_out))),
    )
    own_train, own_test = (_each_by_its_owner(samples, own, every, whole) for samples, own in parts)
    return replace(data, train=own_train, test=own_test, mean=(), std=()), scales


def _each_by_its_owner(samples: Examples, parts: Sequence[Indices], scales: Sequence[Scale], rest: Scale) -> Samples:
    if not isinstance(samples, Samples):
        raise DataError("standardise=local is for examples in memory")
    inputs = samples.inputs.clone()
    owned = np.concatenate([np.empty(0, np.int64), *parts])
    left = np.setdiff1d(np.arange(len(samples)), owned)
    for part, scale in (*zip(parts, scales, strict=True), (left, rest)):
        own = torch.as_tensor(part).to(inputs.device)
        if len(own):
            inputs[own] = Subset(samples, own, mean=scale.mean, std=scale.std).batch(torch.arange(len(own)))[0]
    return Samples(inputs, samples.targets, samples.groups, samples.units)

"""Mean and standard deviation of inputs, per channel or feature, from training examples alone.

``federated``: the moments (count, mean, sum of squared deviations) of each client's training examples, merged in the
order of the clients, as a server can do with these sums alone. ``local``: each client uses its own. ``ranges``: from
stated ranges of the features; no example is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Literal

import numpy as np
import torch

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.dataset import Dataset
from fedbn_flwr.lab.data.samples import Samples, moments_of_inputs
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.data.subset import Subset
from fedbn_flwr.training.input_scale import FeatureMoments, Scale, scale_of

__all__ = ["Standardise", "standardised"]

Standardise = Literal["", "federated", "local", "ranges", "none"]


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
    if how in ("none", "ranges"):  # by ranges the data have their scale already
        return data, ()
    moments = [moments_of_inputs(data.train, part) for part in train]
    federation = scale_of(reduce(FeatureMoments.merged, moments))
    if how == "federated":
        return data.normalised(federation.mean, federation.std), ()
    if data.train.as_bytes:
        raise DataError("standardise=local is for rows and signals; images have one mean and std in all clients.")
    scales = tuple(map(scale_of, moments))
    every = [*scales, *(scale_of(moments_of_inputs(data.train, part)) for part, _ in held_out)]
    train_parts = [*(train if owned is None else owned), *(part for part, _ in held_out)]
    test_parts = [*test, *(part for _, part in held_out)]
    return replace(
        data,
        train=_each_by_its_owner(data.train, train_parts, every, federation),
        test=_each_by_its_owner(data.test, test_parts, every, federation),
        mean=(),
        std=(),
    ), scales


def _each_by_its_owner(samples: Samples, parts: list[Indices], scales: list[Scale], rest: Scale) -> Samples:
    """Return the samples, each part standardised by its scale, and what is in no part by ``rest``."""
    if not samples.in_memory:
        raise DataError("standardise=local is for examples in memory")
    inputs = samples.inputs.clone()
    left = np.setdiff1d(np.arange(len(samples)), np.concatenate([np.empty(0, np.int64), *parts]))
    for part, scale in zip([*parts, left], [*scales, rest], strict=True):
        if len(part):
            subset = Subset(samples, part, mean=scale.mean, std=scale.std)
            inputs[subset.indices] = subset.batch(torch.arange(len(part)))[0]
    return Samples(inputs, samples.targets, samples.groups, samples.units)

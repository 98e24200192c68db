"""Distances between two sets of BatchNorm statistics of one layer.

A layer with C channels has a mean mu (C,) and a variance var (C,). Three distances of (mu_k, var_k) from (mu, var):

| name | formula | unit | source |
|---|---|---|---|
| ``l1`` | sum over the channels of abs(mu_k - mu) + abs(var_k - var) | that of the input | FixBN, Fig. 3 (a) |
| ``mean`` | average over the channels of abs(mu_k - mu) / sqrt(var + eps) | standard deviations | |
| ``variance`` | average over the channels of abs(log((var_k + eps) / (var + eps))) | factor e | |

``l1`` over all layers is the norm of the paper's figure. It depends on the scale of the activations, so layers are not
comparable by it; ``mean`` and ``variance`` have no unit. Both variances must be of one kind, biased or unbiased.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Distance", "Statistics", "distance"]


class Statistics(NamedTuple):
    """Statistics of one BatchNorm layer: ``mean`` (C,) and ``variance`` (C,)."""

    mean: Tensor
    variance: Tensor


class Distance(NamedTuple):
    """The three distances of the table above."""

    l1: float
    mean: float
    variance: float


def distance(statistics: Statistics, reference: Statistics, eps: float) -> Distance:
    """Return the distances of statistics from the reference, computed in float64; ``eps`` is the layer's."""
    mean, variance = (values.double() for values in statistics)
    mean_0, variance_0 = (values.double() for values in reference)
    l1 = (mean - mean_0).abs().sum() + (variance - variance_0).abs().sum()
    shift = ((mean - mean_0).abs() / (variance_0.clamp(min=0) + eps).sqrt()).mean()
    factor = torch.log((variance.clamp(min=0) + eps) / (variance_0.clamp(min=0) + eps)).abs().mean()
    return Distance(float(l1), float(shift), float(factor))

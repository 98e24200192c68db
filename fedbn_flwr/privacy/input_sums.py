r"""Mean and deviation of the inputs under masks or noise: bounded sums of features whose ranges are stated.

## Algorithm

$[a, b]$ is the range of a feature, stated in the run's config, $c = (a + b) / 2$ and $h = (b - a) / 2$. A value $x$ is
first put into the range, a client does so when it reads its data. With $u = (x - c) / h$ each record gives, for each
feature that it has,

$$r = \left(1, u, u^2 - \tfrac{1}{2}\right), \qquad \lVert r \rVert^2 = 1 + u^2 + (u^2 - \tfrac{1}{2})^2 \le
\tfrac{9}{4},$$

and 0 for a missing one; for a signal the mean of $r$ over its steps. $S_i$ is the sum of $r$ over the records of client
$i$, and $(N, U, Q)$ what the server gets in place of $\sum_i S_i$. The mean of a feature is $c + h\, U / N$, its biased
variance $h^2 (Q / N + \tfrac{1}{2} - (U / N)^2)$.

- Masked sums: client $i$ sends $S_i / |D_i|$ with the weight $|D_i|$ (``privacy.ring``): the sum is that of the plain
  $S_i$ but for the rounding of fixed-point numbers.
- Differential privacy of clients: client $i$ gives $S_i / N_i$ for each feature that it has, whose norm over $F$
  features is at most $C = \tfrac{3}{2} \sqrt{F}$ like that of a record. The server adds $\mathcal{N}(0, (z C)^2)$ to
  the sum over the clients. The result is the mean of the clients' means; each client counts alike.
- Differential privacy of records: client $i$ adds $\mathcal{N}(0, (z C)^2)$ to $S_i$ itself. The removal of one record
  changes $S_i$ by at most $C$.

Either noise is one Gaussian release with the noise multiplier $z$. What is computed from the noisy sums costs nothing.
So the mean is put into its range, and a feature whose noisy count or variance is no larger than the deviation of the
noise in it gets the range in place of its mean and deviation: $c$ and $h / \sqrt 3$, those of a uniform distribution.

Source: the Gaussian mechanism, Dwork and Roth 2014, "The Algorithmic Foundations of Differential Privacy", Appendix A.
The bounded record and the shift of $u^2$ by its middle are ours.

## Law

Without noise mean and deviation are those of all records, or of the clients' means, up to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedbn_flwr.training.input_scale import FeatureMoments, FeatureRanges, Scale, scale_of

__all__ = ["bounded_mean", "bounded_sums", "noisy_scale", "norm_bound", "scale_of_sums"]

_ROW = 1.5  # largest norm of (1, u, u^2 - 1/2)


def norm_bound(num_features: int) -> float:
    """Return C, the largest norm of what one record, or one client, adds to the sums."""
    return _ROW * math.sqrt(num_features)


def bounded_sums(moments: FeatureMoments, ranges: FeatureRanges, per_record: int = 1) -> Tensor:
    """Return S (3, F), float64: the sums of 1, u and u^2 - 1/2 over the records of a client.

    Args:
        moments: of values inside the ranges.
        ranges: of the features.
        per_record: values of a feature in a record, each of which counts 1 / ``per_record``: the steps of a signal.
    """
    count = moments.count / per_record
    mean = ((moments.mean - ranges.middle) / ranges.half).clamp(-1, 1)
    variance = moments.m2 / moments.count.clamp(min=1) / ranges.half.square()
    square = torch.minimum(variance + mean.square(), torch.ones_like(mean))
    return torch.stack([count, count * mean, count * (square - 0.5)]) * (count > 0)


def bounded_mean(sums: Tensor) -> Tensor:
    """Return S / N (3, F): a client's means over the records that have the feature, 0 for a feature that none has."""
    return torch.where(sums[0] > 0, sums / sums[0].clamp(min=1e-300), 0.0)


def scale_of_sums(total: Tensor, ranges: FeatureRanges) -> Scale:
    """Return mean and deviation from sums (N, U, Q), (3, F), or from sums in proportion to them, without noise.

    A feature that is constant, or that nobody has, has the deviation 1, as in ``scale_of``: constant is what rounding
    cannot tell from it, a variance below 1e-12 of the squared half range.
    """
    count, mean, variance = _unit(total)
    variance = torch.where(variance > 1e-12, variance, 0.0)
    mean = torch.where(count > 0, ranges.middle + ranges.half * mean, 0.0)
    one = torch.ones_like(mean)
    return scale_of(FeatureMoments(one, mean, torch.where(count > 0, variance, 0.0) * ranges.half.square()))


def noisy_scale(total: Tensor, deviation: float, ranges: FeatureRanges) -> tuple[Scale, list[int]]:
    """Return mean and deviation from noisy sums, and the features that have those of their range.

    Args:
        total: the sums (N, U, Q) with noise, (3, F).
        deviation: of the noise in each of their values.
        ranges: of the features.
    """
    count, mean, variance = _unit(total)
    usable = (count > deviation) & (variance > deviation / count.clamp(min=1e-300))
    uniform = ranges.scale()
    means = torch.where(usable, ranges.middle + ranges.half * mean.clamp(-1, 1), ranges.middle)
    stds = torch.where(usable, ranges.half * variance.clamp(0, 1).sqrt(), torch.tensor(uniform.std, dtype=mean.dtype))
    return Scale(tuple(means.tolist()), tuple(stds.tolist())), (~usable).nonzero().flatten().tolist()


def _unit(total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count, and the mean and the biased variance of u; 0 where there is no count."""
    count = total[0]
    mean, square = (torch.where(count > 0, part / count.clamp(min=1e-300), 0.0) for part in total[1:])
    return count, mean, square + 0.5 - mean.square()

"""The sums of the inputs of examples in memory, from which their mean and standard deviation follow."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.samples import Examples, Samples
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.training.input_scale import FeatureMoments

__all__ = ["moments_of_inputs"]

_CHUNK = 4096


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

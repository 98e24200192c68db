"""Statistics of single training batches, and distances between statistics.

The model is in eval mode, except that BatchNorm normalises by the batch. The statistics
are S_m,B of FixBN, section 5, under fixed weights. The model itself does not change.

A layer with C channels has a mean mu (C,) and a variance var (C,). Two distances of
(mu_k, var_k) from (mu, var), averages over the channels:

| name | formula | unit |
|---|---|---|
| ``mean`` | abs(mu_k - mu) / sqrt(var + eps) | standard deviations |
| ``variance`` | abs(log((var_k + eps) / (var + eps))) | factor e |

Both variances must be of the same kind, biased or unbiased.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.reestimation import Moments, gathered_inputs, merge
from fedbn_flwr.doctor.clients import ClientExamples
from fedbn_flwr.training.batches import inputs_for, join_last
from fedbn_flwr.training.borrowed import borrowed
from fedbn_flwr.training.freezing import layers_of, stays_in_eval

__all__ = [
    "BatchMoments",
    "Distance",
    "Statistics",
    "batch_moments",
    "distance",
    "eval_layers",
    "noise",
    "normalising_by_batch",
]


class Statistics(NamedTuple):
    """Mean and variance of one BatchNorm layer, (C,) each."""

    mean: Tensor
    variance: Tensor


class Distance(NamedTuple):
    """The two distances of the table above."""

    mean: float
    variance: float


def distance(statistics: Statistics, reference: Statistics, eps: float) -> Distance:
    """Return the distances of statistics from a reference, given the layer's eps."""
    # Use float64, because small differences of float32 statistics would be rounding
    # errors.
    mean, variance = (values.double() for values in statistics)
    mean_0, variance_0 = (values.double() for values in reference)
    # Treat negative running variances as 0, because another finding reports them.
    scale = variance.clamp(min=0) + eps
    scale_0 = variance_0.clamp(min=0) + eps
    shift = ((mean - mean_0).abs() / scale_0.sqrt()).mean()
    factor = torch.log(scale / scale_0).abs().mean()
    return Distance(float(shift), float(factor))


BatchMoments = Mapping[str, Sequence[Moments]]
"""The moments of each batch of one client, on the CPU, by path of the layer."""


def eval_layers(model: nn.Module) -> list[str]:
    """Return the paths of the BatchNorm layers that stay in eval mode in training.

    ``force_eval`` or the model's own ``train`` keeps such a layer in eval mode, or the
    layer is in eval mode in a model that is in train mode. A shared layer is listed
    under all of its paths.
    """
    in_eval = stays_in_eval(model)
    layers = layers_of(model, every_path=True)
    return [path for path, layer in layers.items() if layer in in_eval]


@contextmanager
def normalising_by_batch(model: nn.Module) -> Iterator[nn.Module]:
    """Lend the model in eval mode, with BatchNorm layers that normalise by the batch.

    Layers in eval mode use their running statistics, as in training.
    """
    in_eval = eval_layers(model)
    with borrowed(model) as working:
        working.eval()
        for path, layer in layers_of(working).items():
            if path not in in_eval:
                layer.training = True
                # With this flag, torch leaves the running statistics unchanged.
                layer.track_running_stats = False
        yield working


def batch_moments(model: nn.Module, data: ClientExamples) -> BatchMoments:
    """Return the moments of each batch of a client's examples.

    Batches have the client's batch size, but at least 2 examples. A last batch of one
    example joins the batch before it. Several calls of a layer in a pass count as one
    batch. A layer that is not called has no moments. The result is empty if the client
    has only one example.
    """
    layers = layers_of(model)
    prepared = inputs_for(model)
    if len(data) < 2:
        return {}
    # Use at least two examples, because BatchNorm refuses batches with a single value
    # per channel, as in training.
    batches = list(torch.split(data.inputs, max(2, data.batch_size)))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches = join_last(batches)
    by_path: dict[str, list[Moments]] = {path: [] for path in layers}
    with normalising_by_batch(model) as working, torch.no_grad():
        for batch in batches:
            with gathered_inputs(layers) as sums:
                # The model may change its inputs in place.
                working(prepared(batch.clone()))
            for path, one in sums.merged().items():
                on_cpu = Moments(one.count, one.mean.cpu(), one.m2.cpu())
                by_path[path].append(on_cpu)
    return by_path


def noise(moments: Sequence[Moments], eps: float) -> float:
    """Return how much the batch mean varies within the client, without unit.

    The noise is std_B(mu_B) / sqrt(var + eps), averaged over the channels. It is about
    1 / sqrt(batch size) for inputs (N, C), and less for images, because their pixels
    count as well. At least two batches are necessary.
    """
    means = torch.stack([m.mean for m in moments])
    deviation = (merge(moments).variance + eps).sqrt()
    return float((means.std(0) / deviation).mean())

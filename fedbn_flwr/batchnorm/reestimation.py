"""BatchNorm statistics of a batch, and of a whole pass over data ("precise BN").

All computations of statistics are here: the clients' answers to the server's
re-estimation (``recalibrate``, StaticBN), test-time BatchNorm, and the doctor.

Each batch gives (count, mean, M2) per channel; M2 is the sum of squared deviations from
the mean. Many batches are merged in one operation (Chan, Golub, LeVeque 1979), without
cancellation. Running statistics are the mean and M2 / (n - 1), the unbiased variance,
as in torch's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.layer_inputs import watch_inputs
from fedbn_flwr.batchnorm.layers import batchnorm_layers, tracking_layers
from fedbn_flwr.training.batches import Batches, inputs_for, with_positions
from fedbn_flwr.training.borrowed import Lend, borrowed, lending
from fedbn_flwr.training.channels import (
    batch_mean_and_variance,
    other_axes,
)
from fedbn_flwr.training.freezing import layers_of, left_in_eval
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.single_examples import joined, raise_named
from fedbn_flwr.training.tasks import CLASSIFICATION, Task

__all__ = [
    "MomentSums",
    "Moments",
    "batch_statistics",
    "gathered_inputs",
    "load_statistics",
    "merge",
    "moments_of",
    "reestimate_statistics",
]


# Number of elements in a block. A block in float64 has 2 MiB and stays in the cache.
_BLOCK = 1 << 18
# Number of moments that are collected for a layer before they are merged.
_KEPT = 64


@dataclass(frozen=True)
class Moments:
    """Statistics of ``count`` values per channel.

    ``mean`` and ``m2`` are float64 (C,).
    """

    count: int
    mean: Tensor
    m2: Tensor

    @property
    def variance(self) -> Tensor:
        """The unbiased variance (C,) of two or more values, like torch's."""
        return self.m2 / (self.count - 1)


def moments_of(values: Tensor) -> Moments:
    """Return the moments of a BatchNorm layer's input (N, C, *), by channel."""
    values = values.detach()
    # Use blocks only on a CPU. A GPU has no such cache and is faster with few large
    # kernels.
    if values.device.type == "cpu" and values.numel() > _BLOCK:
        blocks = torch.split(values, max(1, _BLOCK * len(values) // values.numel()))
        return merge([_moments_of_block(block) for block in blocks])
    return _moments_of_block(values)


def _moments_of_block(values: Tensor) -> Moments:
    axes, count = other_axes(values), values.numel() // values.shape[1]
    # Copy the values, because the lines below change them in place. The copy keeps
    # their memory format.
    wide = values.to(torch.float64, copy=True)
    # Use a single kernel on a GPU. On a CPU, this kernel takes ten times as long as the
    # four operations below.
    if wide.is_cuda:
        var, mean = torch.var_mean(wide, axes, correction=0)
        return Moments(count, mean, var * count)
    # Use two passes, because E[x^2] - E[x]^2 loses digits if the mean is far above the
    # deviation.
    mean = wide.mean(axes, keepdim=True)
    m2 = wide.sub_(mean).square_().sum(axes)
    return Moments(count, mean.flatten(), m2)


def merge(moments: Sequence[Moments]) -> Moments:
    """Return the moments of the union of sets of values, one of which is not empty."""
    # Leave out empty sets, because the mean of no values is NaN.
    moments = [one for one in moments if one.count]
    if len(moments) == 1:
        return moments[0]
    count, first = sum(one.count for one in moments), moments[0].mean
    counts = first.new_tensor([[one.count] for one in moments])
    # First subtract one of the means from all of them. The numbers stay small, so no
    # digit is lost.
    apart = torch.stack([one.mean for one in moments]) - first
    shift = (counts * apart).sum(0) / count
    # M2 = sum_i M2_i + sum_i n_i (mean_i - mean)^2 (Chan, Golub, LeVeque).
    within = torch.stack([one.m2 for one in moments]).sum(0)
    between = (counts * (apart - shift).square()).sum(0)
    return Moments(count, first + shift, within + between)


class MomentSums:
    """The moments of layers' inputs over all calls, by path.

    They are collected and merged in groups, to save operations and memory.
    """

    def __init__(self) -> None:
        self._moments: dict[str, list[Moments]] = {}

    def gather(self, path: str, x: Tensor) -> None:
        """Add the moments of the input of a call.

        Calls with zero rows, such as calls of an idle expert, are ignored.
        """
        if not x.numel():
            return
        waiting = self._moments.setdefault(path, [])
        waiting.append(moments_of(x))
        if len(waiting) == _KEPT:
            waiting[:] = [merge(waiting)]

    def merged(self) -> dict[str, Moments]:
        """Return the moments of the called layers."""
        return {path: merge(moments) for path, moments in self._moments.items()}


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance (C,) of a batch (N, C, *).

    Both are in float32 or wider. One value per channel has variance 0.
    """
    return batch_mean_and_variance(x.to(torch.promote_types(x.dtype, torch.float32)))


def reestimate_statistics(
    model: nn.Module,
    data: Batches,
    *,
    batch_size: int,
    seed: int = 0,
    measured: Collection[str] = (),
    forward: Callable[[Any, Any], Any] | None = None,
    second: Lend | None = None,
    task: Task = CLASSIFICATION,
) -> dict[str, Moments]:
    """Return the statistics of every BatchNorm layer from one pass over the data.

    The borrowed model makes the pass in train mode: BatchNorm uses each batch's own
    statistics, and running statistics are neither used nor changed. Layers that the
    model keeps in eval mode, or that are in eval mode while the model is in train mode,
    are left out.

    Args:
        model: the model, with the weights to use, on the device to use.
        data: every example is used once, in order and as returned by ``batch`` without
            a generator. The last batch may be smaller. If BatchNorm cannot use a last
            batch of one example, the last two batches are joined.
        batch_size: examples per batch; 0 means one batch of all examples.
        seed: for dropout and other random layers.
        measured: paths of the BatchNorm layers to measure. The others are in eval mode
            like in a test. () means all.
        forward: ``forward(model, inputs)`` is called instead of ``model(inputs)``, if
            the training uses layers that the model's own forward does not use.
        second: lends a second model, to try a last batch of one example.
        task: a user's task calls the model as in training.

    Returns:
        The moments by layer path. A layer called several times counts all its inputs; a
        layer registered at several paths has an entry for each. Layers that were not
        called are left out, and so are layers with less than two values.

    Raises:
        NormLayerError: the model does not have the paths in ``measured``, or a
            BatchNorm layer has its own forward pass or raises a ValueError; the message
            names the layer.
    """
    in_eval = left_in_eval(model).values()
    chosen = batchnorm_layers(model, measured)
    prepared = inputs_for(model)
    with borrowed(model):
        model.train()
        for layer in layers_of(model).values():
            if layer in in_eval or layer not in chosen:
                layer.training = False
        # Use batches of at least two examples, even if batches in training have one. A
        # BatchNorm after a linear layer cannot compute statistics of one example.
        size = max(batch_size, 2) if batch_size else max(len(data), 1)
        order: Sequence[Tensor] = ()
        if len(data):
            order = torch.split(torch.arange(len(data)), size)
        # With ``forward``, do not try the model on one example, because the model's own
        # forward pass does not use all layers that ``forward`` uses.
        tried = None if forward else lending(model, task, second)
        with seeded(seed):
            order = joined(model, data, order, prepared, tried)
        tracking = tracking_layers(model)
        layers = {
            path: one for path, one in layers_of(model).items() if one in tracking
        }
        for layer in tracking:
            layer.track_running_stats = False
        with (
            torch.no_grad(),
            gathered_inputs(layers) as gathered,
            seeded(seed),
            closing(with_positions(data, order)) as batches,
        ):
            for positions, (inputs, targets) in batches:
                try:
                    if forward:
                        forward(model, prepared(inputs))
                    else:
                        task.run(model, prepared(inputs), targets)
                except ValueError as error:
                    # torch's error for one value per channel does not name the layer
                    raise_named(error, model, len(positions))
    of_layer = {layers[path]: moments for path, moments in gathered.merged().items()}
    every = layers_of(model, every_path=True)
    return {path: of_layer[one] for path, one in every.items() if one in of_layer}


def load_statistics(
    model: nn.Module, moments: Mapping[str, Moments], *, unbiased: bool = False
) -> None:
    """Load re-estimated statistics as running statistics of BatchNorm layers.

    Args:
        model: changed in place.
        moments: by layer path, as returned by ``reestimate_statistics``.
        unbiased: whether the variance is unbiased, like torch's running variance, or
            biased, like the variance of a batch in training.
    """
    for path, of_layer in moments.items():
        layer: Any = model.get_submodule(path)
        layer.running_mean.copy_(of_layer.mean)
        layer.running_var.copy_(of_layer.m2 / (of_layer.count - unbiased))


@contextmanager
def gathered_inputs(layers: Mapping[str, _BatchNorm]) -> Iterator[MomentSums]:
    """Gather the moments of all inputs of these layers, in the block.

    Raises:
        NormLayerError: a layer has its own forward pass.
    """
    sums = MomentSums()
    undo = watch_inputs(layers, sums.gather)
    try:
        yield sums
    finally:
        for one in undo:
            one()

"""BatchNorm statistics of a batch, and of a whole pass over data ("precise BN").

All computations of statistics are here: the clients' answers to the server's
re-estimation (``recalibrate``, StaticBN, FBN), the statistics of methods that replace
BatchNorm's forward pass, test-time BatchNorm, and the doctor.

Each batch gives (count, mean, M2) per channel; M2 is the sum of squared deviations from
the mean. Many batches are merged in one operation (Chan, Golub, LeVeque 1979), without
cancellation. Running statistics are the mean and M2 / (n - 1), the unbiased variance,
as in torch's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.parts import batchnorm_layers
from fedbn_flwr.training.batches import Batches, inputs_for, join_last, with_positions
from fedbn_flwr.training.channels import (
    batch_mean_and_variance,
    other_axes,
)
from fedbn_flwr.training.freezing import layers_of, left_in_eval
from fedbn_flwr.training.model_state import copied
from fedbn_flwr.training.modes import restored_modes
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.single_examples import name_layer, takes_one_example

__all__ = [
    "MomentSums",
    "Moments",
    "batch_statistics",
    "gathered_inputs",
    "load_statistics",
    "merge",
    "moments_of",
    "reestimate_statistics",
    "stop_tracking",
    "tracking_layers",
]


# Number of elements in a block. A block in float64 has 2 MiB and stays in the cache.
_BLOCK = 1 << 18
_TRACKED = ("running_mean", "running_var", "num_batches_tracked")
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
    """Return the moments of the union of one or more sets of values.

    Raises:
        ValueError: all sets are empty.
    """
    # Leave out empty sets, because the mean of no values is NaN.
    moments = [one for one in moments if one.count]
    if not moments:
        raise ValueError(
            "merge() got no values and cannot compute a mean. Give it moments of at"
            " least one value."
        )
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
    """The moments of layers' inputs, over all calls.

    They are collected and merged in groups, to save operations and memory.
    """

    def __init__(self) -> None:
        self._moments: dict[nn.Module, list[Moments]] = {}

    def gather(self, layer: nn.Module, moments: Moments) -> None:
        """Add the moments of a call of ``layer``.

        Calls with zero rows, such as calls of an idle expert, are ignored.
        """
        if not moments.count:
            return
        waiting = self._moments.setdefault(layer, [])
        waiting.append(moments)
        if len(waiting) == _KEPT:
            waiting[:] = [merge(waiting)]

    def by_path(self, model: nn.Module) -> dict[str, Moments]:
        """Return the moments of the called layers, by each of their paths."""
        merged = {layer: merge(moments) for layer, moments in self._moments.items()}
        by_path = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if module in merged:
                by_path[path] = merged[module]
        return by_path


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance (C,) of a batch (N, C, *).

    Both are in float32 or wider. One value per channel has variance 0.
    """
    return batch_mean_and_variance(_wide(x))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def tracking_layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers that update running statistics in a forward pass."""
    layers = []
    for layer in layers_of(model).values():
        tracks = layer.running_mean is not None and layer.track_running_stats
        if layer.training and tracks:
            layers.append(layer)
    return layers


def stop_tracking(layers: Collection[_BatchNorm]) -> Callable[[], None]:
    """Let layers in train mode update no buffer, and return the undo function.

    The layers then use the batch's statistics. A custom forward pass may update buffers
    in any case. The undo function undoes these changes as well.
    """
    kept = []
    for layer in layers:
        if type(layer).forward is not _BatchNorm.forward:
            for name, buffer in layer.named_buffers(recurse=False):
                if name in _TRACKED:
                    kept.append((layer, name, buffer, buffer.clone()))
    before = [(layer, layer.track_running_stats) for layer in layers]
    for layer in layers:
        layer.track_running_stats = False

    def undo() -> None:
        for layer, tracked in before:
            layer.track_running_stats = tracked
        # Put back the original buffer object, because the pass may have replaced it and
        # other objects may refer to it.
        with torch.no_grad():
            for layer, name, buffer, value in kept:
                setattr(layer, name, buffer.copy_(value))

    return undo


def reestimate_statistics(
    model: nn.Module,
    data: Batches,
    *,
    batch_size: int,
    seed: int = 0,
    measured: Collection[str] = (),
    forward: Callable[[Any], Any] | None = None,
) -> dict[str, Moments]:
    """Return the statistics of every BatchNorm layer from one pass over the data.

    The model does not change. It is in train mode in the pass: BatchNorm uses each
    batch's own statistics, and running statistics are neither used nor changed. Layers
    that the model keeps in eval mode, or that are in eval mode while the model is in
    train mode, are left out.

    Args:
        model: the model, with the weights to use, on the device to use.
        data: every example is used once, in order and as returned by ``batch`` without
            a generator. The last batch may be smaller. If BatchNorm cannot use a last
            batch of one example, the last two batches are joined.
        batch_size: examples per batch; 0 means one batch of all examples.
        seed: for dropout and other random layers.
        measured: paths of the BatchNorm layers to measure. The others are in eval mode
            like in a test. () means all.
        forward: called with the inputs of each batch instead of ``model``, if the
            training uses layers that the model's own forward does not use. The function
            calls the layers of ``model``.

    Returns:
        The moments by layer path. A layer called several times counts all its inputs; a
        layer registered at several paths has an entry for each. Layers that were not
        called are left out. The result is empty for less than two examples, because
        BatchNorm cannot compute statistics from them.

    Raises:
        NormLayerError: a layer is in TorchScript, the model does not have the paths in
            ``measured``, or a BatchNorm layer raises a ValueError; the message names
            the layer.
    """
    if forward is None:  # nothing that a pass changes stays in the model
        model = copied(model)
    chosen = batchnorm_layers(model, measured, "re-estimated statistics")
    in_eval = [one for one in batchnorm_layers(model) if one not in chosen]
    in_eval += left_in_eval(model).values()
    with restored_modes(model), torch.no_grad():
        model.train()
        for layer in in_eval:
            layer.training = False
        watched = tracking_layers(model)

        prepared = inputs_for(model)
        # With ``forward``, do not try the model on one example, because the model's own
        # forward pass does not use all layers that ``forward`` uses.
        tried = model if forward is None else None
        with seeded(seed):
            order = _positions(tried, data, batch_size, prepared)
        with gathered_inputs(watched) as gathered, ExitStack() as stack:
            stack.callback(stop_tracking(watched))
            stack.enter_context(seeded(seed))
            batches = stack.enter_context(closing(with_positions(data, order)))
            for positions, (inputs, _) in batches:
                try:
                    (forward or model)(prepared(inputs))
                except ValueError as error:
                    # torch's error for one value per channel does not name the layer
                    name_layer(error, model, len(positions))
                    raise
    return gathered.by_path(model)


def load_statistics(model: nn.Module, moments: Mapping[str, Moments]) -> None:
    """Load re-estimated statistics as running statistics of BatchNorm layers.

    The variance is biased, like the variance of a batch in training.

    Args:
        model: changed in place.
        moments: by layer path, as returned by ``reestimate_statistics``.
    """
    for path, of_layer in moments.items():
        layer: Any = model.get_submodule(path)
        layer.running_mean.copy_(of_layer.mean)
        layer.running_var.copy_(of_layer.m2 / of_layer.count)


def _positions(
    model: nn.Module | None,
    data: Batches,
    batch_size: int,
    prepared: Callable[[Any], Any],
) -> list[Tensor]:
    """Return the positions of the examples of each batch.

    If the last batch has one example, ``model`` is tried on this batch. If the model
    refuses it, or is None, the last two batches are joined.
    """
    if not len(data):
        return []
    # Use batches of at least two examples, even if the batches in training have one. A
    # BatchNorm after a linear layer cannot compute statistics of one example.
    size = max(batch_size, 2) if batch_size else len(data)
    batches = list(torch.split(torch.arange(len(data)), size))
    last = batches[-1]
    if len(last) > 1:
        return batches
    if model is not None and takes_one_example(model, prepared(data.batch(last)[0])):
        return batches
    return join_last(batches)


@contextmanager
def gathered_inputs(layers: Collection[_BatchNorm]) -> Iterator[MomentSums]:
    """Gather the moments of all inputs of these layers in the block."""
    sums = MomentSums()

    # Note the input before the call, because the layer may change it in place.
    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sums.gather(layer, moments_of(args[0] if args else kwargs["input"]))

    handles = [
        layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers
    ]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()

"""Re-estimation ("precise BN"): BatchNorm statistics from one pass over data under fixed weights. Torch only.

A batch's (count, mean, M2) per channel, M2 = sum of squared deviations from the mean, is merged pairwise into the sums
before it (Chan, Golub, LeVeque 1979), without cancellation. Running statistics are the mean and M2 / (n - 1), the
unbiased variance that torch's layers keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.training.loop import Batches, as_model_input, kept_modes, takes_one_example
from fedbn_flwr.training.randomness import private_randomness

__all__ = ["Moments", "merge", "moments_of", "reestimate_statistics", "tracking_layers"]


@dataclass(frozen=True)
class Moments:
    """Statistics per channel: ``count`` values each, their ``mean`` (C,) and ``m2`` (C,), both float64."""

    count: int
    mean: Tensor
    m2: Tensor

    @property
    def variance(self) -> Tensor:
        """The unbiased variance (C,), torch's for running statistics; it needs two values."""
        return self.m2 / (self.count - 1)


def moments_of(values: Tensor) -> Moments:
    """Return the moments of an input (N, C, *) of a BatchNorm layer, over all dimensions but C."""
    channels = values.detach().transpose(0, 1).flatten(1).double()
    mean = channels.mean(1)
    return Moments(channels.shape[1], mean, (channels - mean[:, None]).square().sum(1))


def merge(first: Moments, second: Moments) -> Moments:
    """Return the moments of both sets of values together."""
    count = first.count + second.count
    apart = second.mean - first.mean
    mean = first.mean + apart * (second.count / count)
    m2 = first.m2 + second.m2 + apart.square() * (first.count * second.count / count)
    return Moments(count, mean, m2)


def tracking_layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers whose running statistics a forward pass in the model's present mode would change."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [
        layer for layer in layers if layer.training and layer.track_running_stats and layer.running_mean is not None
    ]


def reestimate_statistics(model: nn.Module, data: Batches, *, batch_size: int, seed: int = 0) -> dict[str, Moments]:
    """Return the statistics of every BatchNorm layer from one pass in train mode; the model is left as it was.

    BatchNorm normalises with each batch's own statistics; running statistics are neither used nor changed. Layers that
    the model itself keeps in eval mode stay as they are and are left out.

    Args:
        model: on the device it shall run on, with the weights to use.
        data: all of it is used once, in its order and without augmentation, the last batch possibly smaller. A last
            batch of one example joins the one before where BatchNorm could not take it alone.
        batch_size: examples per batch; 0 = all in one.
        seed: of dropout and the like.

    Returns:
        The moments by the layer's path; a layer called several times has all its inputs, one registered at several
        paths stands under each. Layers that were not called are left out. Empty where there is no data, or only one
        example, from which BatchNorm cannot take statistics.
    """
    sums: dict[nn.Module, Moments] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        new = moments_of(args[0] if args else kwargs["input"])
        sums[layer] = merge(sums[layer], new) if layer in sums else new

    parameter = next(model.parameters())
    with kept_modes(model), torch.no_grad():
        model.train()
        batches = _positions(model, data, batch_size, parameter)
        with _watched(model, note), private_randomness(seed, parameter.device):
            for positions in batches:
                model(_inputs(data, positions, parameter))
    found = model.named_modules(remove_duplicate=False)
    return {path: sums[module] for path, module in found if module in sums}


def _positions(model: nn.Module, data: Batches, batch_size: int, like: Tensor) -> list[Tensor]:
    if not len(data):
        return []
    batches = list(torch.split(torch.arange(len(data)), batch_size or len(data)))
    if len(batches[-1]) == 1 and not takes_one_example(model, _inputs(data, batches[-1], like)):
        *batches, last = batches
        if batches:
            batches[-1] = torch.cat([batches[-1], last])
    return batches


def _inputs(data: Batches, positions: Tensor, like: Tensor) -> Tensor:
    return as_model_input(data.batch(positions)[0], like.device, like.dtype)


@contextmanager
def _watched(model: nn.Module, note: Any) -> Iterator[None]:
    """Call ``note`` before every call of a tracking layer; none of them tracks meanwhile."""
    layers = tracking_layers(model)
    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        for layer in layers:
            layer.track_running_stats = False  # in train mode: the batch's statistics, and no buffer is touched
        yield
    finally:
        for layer, handle in zip(layers, handles, strict=True):
            layer.track_running_stats = True
            handle.remove()

"""Convolutions with filters derived from their weight.

A plain convolution is converted in place: only the class of the layer changes, as in
torch's lazy layers. The layer's parameters and their ties, its mode, hooks and paths do
not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms.replaced_layers import named

_COMPUTE = ("forward", "_conv_forward")


class DerivedWeightConv(_ConvNd):
    """A convolution that uses the filters of ``derived_weight()``."""

    def derived_weight(self) -> Tensor:
        """Return the filters to use, in the shape of ``weight``."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """Convolve an input (N, in, *) to (N, out, *)."""
        return self._conv_forward(input, self.derived_weight(), self.bias)


def fan_in(conv: _ConvNd) -> int:
    """Return the number of weights of a filter (out channel)."""
    return conv.weight[0].numel()


def plain_convolutions(model: nn.Module) -> dict[str, _ConvNd]:
    """Return the Conv1d/2d/3d layers (and subclasses) by path, at every path.

    Transposed convolutions are left out, because their out channels are in the second
    dimension.
    """
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    modules = model.named_modules(remove_duplicate=False)
    return {path: module for path, module in modules if isinstance(module, kinds)}


def refuse_unusual(layers: Mapping[str, _ConvNd | nn.Linear], why: str) -> None:
    """Raise NormLayerError if layers cannot be changed, and name these layers.

    Such layers are lazy, parametrized, or have their own arithmetic. ``why`` names the
    change in the message.
    """
    bad = [named(path, layer) for path, layer in layers.items() if _is_unusual(layer)]
    if bad:
        raise NormLayerError(
            f"{why} cannot be used on these layers: {', '.join(bad)}. They are lazy and"
            " have not seen a batch, are parametrized, or have a custom forward. Use"
            " torch's plain layers."
        )


def _is_unusual(layer: _ConvNd | nn.Linear) -> bool:
    if "forward" in vars(layer) or isinstance(layer, LazyModuleMixin):
        return True
    if is_parametrized(layer):
        return True
    # The older forms of parametrizations are forward hooks.
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            return True
    for base in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear):
        if isinstance(layer, base):
            return any(
                getattr(type(layer), name, None) is not getattr(base, name, None)
                for name in _COMPUTE
            )
    return True


def become(
    convolutions: Mapping[str, _ConvNd],
    kinds: Sequence[type[_ConvNd]],
    prepare: Callable[[_ConvNd], None],
) -> None:
    """Call ``prepare`` for each convolution, and change its class in place.

    ``kinds`` are the new classes of 1d, 2d and 3d convolutions.
    """
    # A convolution at several paths changes once.
    for conv in {id(conv): conv for conv in convolutions.values()}.values():
        prepare(conv)
        conv.__class__ = kinds[len(conv.kernel_size) - 1]

"""Adaptive gradient clipping: a unit's gradient is no longer than a share of the unit's weight.

For each unit, |G| the Euclidean norm of its gradient and |W| that of its weight:

    if |G| > clipping * max(|W|, eps):  G <- G * clipping * max(|W|, eps) / |G|.

A unit is one output (index 0) of a parameter of two and more dimensions, and the whole of a vector or scalar. To be
called after the backward pass and before the optimizer's step, so before weight decay and momentum.

Source: Brock et al. 2021b, arXiv:2102.06171, section 4; equal to timm's ``adaptive_clip_grad`` (|G| is taken to be at
least 1e-6 in the quotient). FedWon uses clipping 0.1 and leaves out the classifier's last layer, as Brock et al. do.

Differs from the paper: none known; a vector as one unit, such as a bias, is timm's reading.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.optimizer_hooks import before_steps

__all__ = ["clip_gradients", "clip_in_steps", "exclude_head"]

SMALLEST_NORM = 1e-6


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], clipping: float, eps: float = 1e-3, *, exclude: Iterable[nn.Parameter] = ()
) -> None:
    """Scale down the gradients that are too long for their weights, in place.

    Args:
        parameters: those whose ``grad`` is looked at; one without a gradient is passed over.
        clipping: the paper's lambda; 0 = nothing is clipped.
        eps: least |W|, so that weights that are zero can learn.
        exclude: parameters to pass over, see ``exclude_head``.

    Raises:
        ConfigError: ``clipping`` or ``eps`` is negative or not finite.
    """
    for name, value in (("clipping", clipping), ("eps", eps)):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"adaptive gradient clipping: {name} is {value!r}; it must be a finite number, 0 or more."
            )
    if not clipping:
        return
    left_out = {id(parameter) for parameter in exclude}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or id(parameter) in left_out:
            continue
        allowed = _unit_norms(parameter).clamp_(min=eps).mul_(clipping)
        norms = _unit_norms(gradient)
        clipped = gradient * (allowed / norms.clamp(min=SMALLEST_NORM))
        gradient.copy_(torch.where(norms > allowed, clipped, gradient))


def clip_in_steps(
    optimizer: torch.optim.Optimizer, clipping: float, eps: float = 1e-3, *, exclude: Iterable[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Let ``optimizer`` clip before each of its steps, as ``clip_gradients`` does; return it.

    Raises:
        ConfigError: at the first step, as ``clip_gradients``.
    """
    left_out = tuple(exclude)

    def clip() -> float:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        clip_gradients(parameters, clipping, eps, exclude=left_out)
        return 0.0

    before_steps(optimizer, clip)
    return optimizer


def _unit_norms(values: Tensor) -> Tensor:
    axes = tuple(range(1, values.dim())) or None
    norms: Tensor = torch.linalg.vector_norm(values, dim=axes, keepdim=axes is not None)
    return norms


def exclude_head(model: nn.Module) -> tuple[nn.Parameter, ...]:
    """Return the parameters of the model's last layer, the classifier's, for ``clip_gradients(exclude=...)``.

    It is the linear or convolutional layer registered last, as in every model of the registry; () without such a
    layer. timm leaves out the last two parameters, which is the same where that layer has a weight and a bias.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | _ConvNd)]
    return tuple(layers[-1].parameters(recurse=False)) if layers else ()

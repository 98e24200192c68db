"""Adaptive gradient clipping.

The norm of a unit's gradient is limited to a share of the norm of its weight. For each
unit, let |G| be the Euclidean norm of its gradient and |W| the norm of its weight:

    if |G| > clipping * max(|W|, eps):  G <- G * clipping * max(|W|, eps) / |G|.

A unit is one output (index 0) of a parameter with two or more dimensions, or a whole
vector or scalar. Clip after the backward pass and before the optimizer's step. The step
then adds weight decay and momentum.

Source: Brock et al. 2021b, arXiv:2102.06171, section 4. Equal to timm's
``adaptive_clip_grad`` (in the quotient |G| is at least 1e-6). FedWon uses clipping 0.1
and leaves out the classifier's last layer, as Brock et al. do.

Differs from the paper: none known. A vector, such as a bias, is one unit as in timm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.model_state import head_of, unwrap
from fedbn_flwr.training.optimizer_hooks import dense_gradient
from fedbn_flwr.training.run_memory import first_time

__all__ = ["clip_gradients", "exclude_head"]

EPS = 1e-3  # smallest |W| used, so that weights of zero can learn
SMALLEST_NORM = 1e-6

logger = logging.getLogger("flwr")


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    clipping: float,
    *,
    exclude: Iterable[nn.Parameter] = (),
) -> None:
    """Scale down, in place, the gradients that are too large for their weights.

    Args:
        parameters: the parameters to clip; those without a gradient are skipped.
        clipping: the paper's lambda; 0 means no clipping.
        exclude: parameters to skip, see ``exclude_head``.

    Raises:
        ConfigError: ``clipping`` is negative or not finite.
    """
    if not 0 <= clipping < math.inf:
        raise ConfigError(
            f"adaptive gradient clipping: clipping is {clipping!r}; it must be a finite"
            " number of at least 0."
        )
    if not clipping:
        return
    excluded = {id(parameter) for parameter in exclude}
    for parameter in parameters:
        gradient = None if id(parameter) in excluded else dense_gradient(parameter)
        if gradient is None:
            continue
        # lambda * max(|W|, eps)
        allowed = _unit_norms(parameter).clamp_(min=EPS).mul_(clipping)
        norms = _unit_norms(gradient)
        smaller = allowed / norms.clamp(min=SMALLEST_NORM)
        gradient.mul_(torch.where(norms > allowed, smaller, 1.0))


def _unit_norms(values: Tensor) -> Tensor:
    axes = tuple(range(1, values.dim())) or None
    norms: Tensor = torch.linalg.vector_norm(values, dim=axes, keepdim=axes is not None)
    return norms


def exclude_head(model: nn.Module) -> tuple[nn.Parameter, ...]:
    """Return the parameters of the last layer with a matrix.

    It is the layer that was registered last in the head (``training.model_state``), or in the
    model if the head has another name. A line of the log names the layer. timm leaves
    out the last two parameters; the result is equal for a layer with a weight and a bias.
    """
    named = dict(unwrap(model).named_parameters(remove_duplicate=False))
    head = head_of(named)
    matrices = [
        name
        for name, parameter in named.items()
        if head in ("", name.partition(".")[0])
        and (is_lazy(parameter) or parameter.dim() > 1)
    ]
    if not matrices:
        return ()
    path = matrices[-1].partition(".parametrizations.")[0]
    if path == matrices[-1]:
        path = path.rpartition(".")[0] or path
    if first_time("agc leaves out", path):
        logger.info("Gradient clipping leaves out the last layer, '%s'.", path)
    inside = [p for name, p in named.items() if f"{name}.".startswith(f"{path}.")]
    return tuple(dict.fromkeys(inside))

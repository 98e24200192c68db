"""A module against its formula, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def equals_formula(
    module: nn.Module,
    x: Tensor,
    formula: Callable[[dict[str, Tensor]], Tensor],
    parameters: Iterable[tuple[str, Tensor]],
) -> None:
    """Check outputs and gradients of a module.

    ``formula`` gets copies of the named parameters and returns the outputs.
    """
    own = {name: p.detach().clone().requires_grad_() for name, p in parameters}
    found, wanted = module(x), formula(own)
    upstream = torch.randn_like(wanted)
    found.backward(upstream)
    wanted.backward(upstream)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    for name, p in own.items():
        found = module.get_parameter(name).grad
        torch.testing.assert_close(found, p.grad, rtol=1e-9, atol=1e-11, msg=name)

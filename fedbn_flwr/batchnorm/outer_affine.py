"""Gamma and beta that the owner of a BatchNorm layer applies, found by trying it.

The layer is a ``BatchNorm2d(affine=False)``, say, and the owner scales its output.

A forward pass of the whole model would need an example, and the server has none. The
owner alone takes what BatchNorm takes, so it is tried: it owns gamma and beta if its
outputs are those of a BatchNorm with them. The answer follows from the model, so it is
the same at the server and at every client.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fedbn_flwr.norms.own_forward import random_input
from fedbn_flwr.training.model_state import copied

__all__ = ["outer_affine"]

# Parameters that are tried in pairs.
_MOST = 4


def outer_affine(owner: nn.Module, name: str) -> dict[str, str]:
    """Return the owner's parameters that are gamma ("weight") and beta ("bias").

    The result is empty if none are.

    Args:
        owner: it does not change; its forward pass must be that of a BatchNorm with
            gamma, beta or both, and then its other modules in order, an activation say.
        name: the name of its BatchNorm layer, which has running statistics and no gamma
            and beta; "" if the owner is that layer itself.
    """
    # TorchScript shows no modules by path.
    if isinstance(owner, torch.jit.ScriptModule):
        return {}
    layer: Any = owner.get_submodule(name)
    channels = (layer.num_features,)
    near = [
        leaf
        for leaf, entry in owner.named_parameters(recurse=False)
        if tuple(entry.shape) == channels
    ][:_MOST]
    # With a convolution the owner takes other inputs than BatchNorm.
    if not near or any(entry.dim() > 1 for entry in owner.parameters()):
        return {}
    try:
        return _tried(_with_random_entries(owner), name, near)
    except Exception:
        # Its forward pass is the user's own, and takes other inputs perhaps.
        return {}


@torch.no_grad()
def _tried(trial: nn.Module, name: str, near: list[str]) -> dict[str, str]:
    """Return the first choice of gamma and beta with which the outputs are equal."""
    layer: Any = trial.get_submodule(name)
    x = random_input(layer, torch.float64)
    output = trial(x)
    mean, var, eps = layer.running_mean, layer.running_var, layer.eps
    for leaves in _choices(near):
        affine = {leaf: trial.get_parameter(name) for leaf, name in leaves.items()}
        gamma, beta = affine.get("weight"), affine.get("bias")
        expected = functional.batch_norm(x, mean, var, gamma, beta, eps=eps)
        # What the owner does after gamma and beta, an activation say.
        for child in trial.children():
            if child is not layer:
                expected = child(expected)
        if output.shape != expected.shape:
            continue
        if torch.allclose(output, expected, rtol=1e-9, atol=1e-12):
            return leaves
    return {}


def _choices(near: list[str]) -> Iterator[dict[str, str]]:
    """Yield the names that may be gamma and beta, by leaf."""
    for weight, bias in permutations(near, 2):
        yield {"weight": weight, "bias": bias}
    for name in near:
        yield {"weight": name}
        yield {"bias": name}


@torch.no_grad()
def _with_random_entries(owner: nn.Module) -> nn.Module:
    """Return a copy with random entries, in float64 on the CPU, in eval mode.

    Gamma and beta of 1 and 0 would hide what they do.
    """
    trial = copied(owner).to_empty(device="cpu").double().eval()
    # Above 0, for the variance; a fixed seed, so that all clients find the same.
    draw = torch.Generator().manual_seed(0)
    for entry in (*trial.parameters(), *trial.buffers()):
        entry.copy_(0.5 + torch.rand(entry.shape, generator=draw))
    return trial

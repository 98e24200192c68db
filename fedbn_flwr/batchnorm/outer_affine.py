"""Gamma and beta that the owner of a BatchNorm layer applies, found by a trial.

The owner is the module that contains the layer. For example, the layer is a
``BatchNorm2d(affine=False)``, and the owner scales the output of the layer.

A forward pass of the whole model would need an example, but the server has no data. The
owner takes the same inputs as BatchNorm, so it can be tried separately. It owns gamma
and beta if its outputs equal the outputs of a BatchNorm layer with these parameters.
The result depends only on the model, so the server and all clients find the same
result.
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

# Largest number of parameters that are tried as gamma and beta, in all pairs.
_MOST = 4


def outer_affine(owner: nn.Module, name: str) -> dict[str, str]:
    """Return the names of the owner's parameters that act as gamma and beta.

    The key of gamma is "weight", and the key of beta is "bias". The result is empty if
    the owner has no such parameters.

    Args:
        owner: the module that owns the layer; it does not change. Its forward pass must
            be BatchNorm with gamma, beta or both, followed by its other modules in
            order, such as an activation.
        name: the name of its BatchNorm layer. The layer has running statistics, but no
            gamma and beta. "" means that the owner is this layer.
    """
    # A module in TorchScript does not return its submodules by path.
    if isinstance(owner, torch.jit.ScriptModule):
        return {}
    layer: Any = owner.get_submodule(name)
    channels = (layer.num_features,)
    near = [
        leaf
        for leaf, entry in owner.named_parameters(recurse=False)
        if tuple(entry.shape) == channels
    ][:_MOST]
    # If the owner has a weight matrix, such as a convolution's, it does not take the
    # same inputs as BatchNorm.
    if not near or any(entry.dim() > 1 for entry in owner.parameters()):
        return {}
    try:
        return _tried(_with_random_entries(owner), name, near)
    except Exception:
        # A user's forward pass may fail on these inputs.
        return {}


@torch.no_grad()
def _tried(trial: nn.Module, name: str, near: list[str]) -> dict[str, str]:
    """Return the first choice of gamma and beta that gives equal outputs, or {}."""
    layer: Any = trial.get_submodule(name)
    x = random_input(layer, torch.float64)
    output = trial(x)
    mean, var, eps = layer.running_mean, layer.running_var, layer.eps
    for leaves in _choices(near):
        affine = {leaf: trial.get_parameter(name) for leaf, name in leaves.items()}
        gamma, beta = affine.get("weight"), affine.get("bias")
        expected = functional.batch_norm(x, mean, var, gamma, beta, eps=eps)
        # The owner applies its other modules, such as an activation, after gamma and
        # beta.
        for child in trial.children():
            if child is not layer:
                expected = child(expected)
        if output.shape != expected.shape:
            continue
        if torch.allclose(output, expected, rtol=1e-9, atol=1e-12):
            return leaves
    return {}


def _choices(near: list[str]) -> Iterator[dict[str, str]]:
    """Yield every choice of gamma ("weight") and beta ("bias") from these names."""
    for weight, bias in permutations(near, 2):
        yield {"weight": weight, "bias": bias}
    for name in near:
        yield {"weight": name}
        yield {"bias": name}


@torch.no_grad()
def _with_random_entries(owner: nn.Module) -> nn.Module:
    """Return a copy with random entries, in float64 on the CPU, in eval mode.

    Gamma 1 and beta 0 would have no visible effect.
    """
    trial = copied(owner).to_empty(device="cpu").double().eval()
    # All values are above 0, because variances must be. The seed is fixed, so that all
    # clients agree.
    draw = torch.Generator().manual_seed(0)
    for entry in (*trial.parameters(), *trial.buffers()):
        entry.copy_(0.5 + torch.rand(entry.shape, generator=draw))
    return trial

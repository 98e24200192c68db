"""Whether a BatchNorm subclass does more than BatchNorm, found out by trying it.

What replaces such a layer, or its forward pass, would lose an activation, a scale or a
slope without a word. A mere cast of the input and back loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.training.copying import copied

__all__ = ["has_own_forward", "random_input"]

_OF_TORCH = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
_ENTRIES = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
# Examples and positions; the channels come second. 3d first: most layers take it.
_SHAPES = ((5, 4, 3), (5,), (5, 4), (5, 4, 3, 2))


def has_own_forward(
    layer: _BatchNorm, *, training: bool, then_children: bool = False
) -> bool:
    """Return whether a layer's output is something else than BatchNorm's.

    A layer with torch's forward pass is not tried. Another one is, on a copy with
    random entries: it is BatchNorm's if it has the same outputs. A layer that cannot be
    tried, or that has entries besides BatchNorm's, has its own.

    Args:
        layer: it does not change.
        training: whether the outputs in train mode count, too; else those in eval mode
            alone.
        then_children: whether the outputs are compared with those of BatchNorm and then
            the layer's modules, in order (timm's ``BatchNormAct2d`` has ``drop`` and
            ``act``).
    """
    # Replaced on the object itself, by a method or a compiler.
    if "forward" in vars(layer):
        return True
    kind = type(layer)
    if kind.forward in _OF_TORCH and kind.__call__ is nn.Module.__call__:
        return False
    entries = {*layer._parameters, *layer._buffers}
    if layer._modules.get("parametrizations") or not entries <= _ENTRIES:
        return True
    try:
        trial = _with_random_entries(layer)
        after = list(trial.children()) if then_children else []
        for mode in (False, True) if training else (False,):
            if _differs(trial.train(mode), random_input(trial), after):
                return True
    except Exception:
        # A forward pass of the user's own may raise anything, and a layer may refuse to
        # be copied.
        return True
    return False


def _with_random_entries(layer: _BatchNorm) -> _BatchNorm:
    """Return a copy with random entries, in float32 on the CPU.

    Gamma and beta of 1 and 0, or of 0, would hide what follows them.
    """
    trial = copied(layer).to_empty(device="cpu").float()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for entry in (trial.weight, trial.bias, trial.running_mean):
            if entry is not None:
                entry.copy_(torch.randn(entry.shape, generator=draw))
        if trial.running_var is not None:
            shape = trial.running_var.shape
            trial.running_var.copy_(1 + torch.rand(shape, generator=draw))
        if trial.num_batches_tracked is not None:
            trial.num_batches_tracked.zero_()
        for child in trial.children():
            for entry in (*child.parameters(), *child.buffers()):
                entry.copy_(torch.rand(entry.shape, generator=draw))
    return trial


def random_input(layer: _BatchNorm, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a random input on the CPU that the layer takes, the same in every call.

    Raises:
        ValueError: it takes none of 2 to 5 dimensions.
    """
    for first, *others in _SHAPES:
        shape = (first, layer.num_features, *others)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        try:
            layer._check_input_dim(x)  # type: ignore[no-untyped-call]
        except ValueError:
            continue
        return x
    raise ValueError(f"{type(layer).__name__} takes no input of 2 to 5 dimensions")


@torch.no_grad()
def _differs(layer: _BatchNorm, x: Tensor, after: Iterable[nn.Module]) -> bool:
    """Return whether a layer's output is not BatchNorm's, with ``after`` behind it."""
    by_batch = layer.training or layer.running_mean is None
    mean, var = layer.running_mean, layer.running_var
    if by_batch:
        mean = var = None
    expected = functional.batch_norm(
        x, mean, var, layer.weight, layer.bias, by_batch, 0.0, layer.eps
    )
    for module in after:
        expected = module(expected)
    output = layer(x)
    if output.shape != x.shape:
        return True
    return not torch.allclose(output, expected, rtol=1e-4, atol=1e-5)

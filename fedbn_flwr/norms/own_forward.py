"""The modules that a BatchNorm subclass applies after BatchNorm.

They are found by a trial. A replacement of such a layer, or of its forward pass, also
applies these modules, such as an activation or a dropout. A replacement would lose a
scale or a slope in the layer's code, so the trial finds such code, and callers refuse
the layer. A cast of the input and back is accepted, because nothing is lost.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.training.model_state import copied
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.run_memory import kept_for_run

_OF_TORCH = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
_ENTRIES = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
# Sizes of trial inputs without the channels, the second dimension. The 3d shape is
# first, because most layers accept it.
_SHAPES = ((5, 4, 3), (5,), (5, 4), (5, 4, 3, 2))


def modules_after(layer: _BatchNorm) -> dict[str, nn.Module] | None:
    """Return the modules that a layer applies after BatchNorm, in order, by name.

    timm's ``BatchNormAct2d`` has ``drop`` and ``act``; ``nn.Identity`` is left out. The
    result is None if the layer cannot be tried, has additional entries, or does
    something else. The trial uses a copy with random entries. In train and in eval
    mode, its outputs must equal BatchNorm followed by the layer's modules in the order
    of registration.

    Args:
        layer: the layer; it does not change. No trial is needed with torch's forward.
    """
    # A method or a compiler has replaced the forward pass of this object.
    if "forward" in vars(layer):
        return None
    kind = type(layer)
    if kind.forward in _OF_TORCH and kind.__call__ is nn.Module.__call__:
        return {}
    entries = {*layer._parameters, *layer._buffers}
    if layer._modules.get("parametrizations") or not entries <= _ENTRIES:
        return None
    # Cache the result. A trial takes as long as a step, and a method asks in each
    # round.
    found: WeakKeyDictionary[nn.Module, bool] = kept_for_run(
        "is BatchNorm", WeakKeyDictionary
    )
    if layer not in found:
        found[layer] = _is_batchnorm(layer)
    if not found[layer]:
        return None
    return {
        name: module
        for name, module in layer.named_children()
        if not isinstance(module, nn.Identity)
    }


def _is_batchnorm(layer: _BatchNorm) -> bool:
    """Return whether a layer's outputs equal BatchNorm followed by its modules."""
    try:
        trial = _with_random_entries(layer)
        return not any(_differs(trial.train(mode)) for mode in (False, True))
    except Exception:
        # A user's forward pass may raise any exception, and a layer may refuse to be
        # copied.
        return False


def _with_random_entries(layer: _BatchNorm) -> _BatchNorm:
    """Return a copy with random entries, in float32 on the CPU.

    Gamma 1 or 0 and beta 0 would hide the operations after them.
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
    """Return a random input on the CPU that fits the layer, equal in every call.

    Raises:
        ValueError: the layer accepts none of 2 to 5 dimensions.
    """
    for first, *others in _SHAPES:
        shape = (first, layer.num_features, *others)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        try:
            layer._check_input_dim(x)  # type: ignore[no-untyped-call]
        except ValueError:
            continue
        return x
    raise ValueError(f"{type(layer).__name__} accepts no input of 2 to 5 dimensions")


@torch.no_grad()
def _differs(layer: _BatchNorm) -> bool:
    x = random_input(layer)
    by_batch = layer.training or layer.running_mean is None
    mean, var = layer.running_mean, layer.running_var
    if by_batch:
        mean = var = None
    expected = functional.batch_norm(
        x, mean, var, layer.weight, layer.bias, by_batch, 0.0, layer.eps
    )
    # Use the same random numbers for both outputs, for example in a dropout.
    with seeded(0, cpu_only=True):
        for module in layer.children():
            expected = module(expected)
    with seeded(0, cpu_only=True):
        output = layer(x)
    if output.shape != x.shape:
        return True
    return not torch.allclose(output, expected, rtol=1e-4, atol=1e-5)

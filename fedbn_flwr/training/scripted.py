"""BatchNorm in TorchScript: its state has the layer's entries, and its forward pass is out of reach. Torch only."""

from __future__ import annotations

import torch
from torch import nn

from fedbn_flwr.errors import NormLayerError

__all__ = ["is_scripted_batchnorm", "refuse_scripted"]

_NAMES = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")


def is_scripted_batchnorm(module: nn.Module) -> bool:
    """Return whether a layer is BatchNorm in TorchScript, which keeps the name of the class only."""
    return isinstance(module, torch.jit.ScriptModule) and getattr(module, "original_name", "") in _NAMES


def refuse_scripted(model: nn.Module, what: str) -> None:
    """Refuse a model with BatchNorm in TorchScript, on which ``what`` would have no effect.

    Raises:
        NormLayerError: there is such a layer; the message names the first.
    """
    for path, module in model.named_modules():
        if is_scripted_batchnorm(module):
            raise NormLayerError(
                f"{what}: BatchNorm layer {path or 'model'!r} is a {type(module).__name__}, in which it would have no "
                "effect. Use the plain module."
            )

"""BatchNorm in TorchScript: its state has the layer's entries, and its forward pass is
out of reach. Torch only.
"""

from __future__ import annotations

import torch
from torch import nn

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.modes import kept_modes

__all__ = ["is_scripted_batchnorm", "refuse_scripted"]

_NAMES = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")


def is_scripted_batchnorm(module: nn.Module) -> bool:
    """Return whether a layer is BatchNorm in TorchScript, which keeps the name of the
    class only.
    """
    return (
        isinstance(module, torch.jit.ScriptModule)
        and getattr(module, "original_name", "") in _NAMES
    )


def refuse_scripted(model: nn.Module, what: str) -> None:
    """Refuse a model with BatchNorm in TorchScript, on which ``what`` would have no
    effect.

    Layers that the model keeps in eval mode, those of a frozen backbone, are left as
    they are.

    Raises:
        NormLayerError: there is such a layer; the message names the first.
    """
    scripted = {
        path: module
        for path, module in model.named_modules()
        if is_scripted_batchnorm(module)
    }
    if not scripted:
        return
    with kept_modes(model):
        model.train()
        refused = [path for path, module in scripted.items() if module.training]
    if refused:
        kind = type(scripted[refused[0]]).__name__
        raise NormLayerError(
            f"{what}: BatchNorm layer {refused[0] or 'model'!r} is a {kind}, in which"
            " it would have no effect. Use the plain module."
        )

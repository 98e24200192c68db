"""The train and eval modes of a model's modules; and BatchNorm in TorchScript, of which
the mode is all that can be changed. Torch only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fedbn_flwr.errors import NormLayerError

__all__ = ["is_scripted_batchnorm", "kept_modes", "refuse_scripted"]

_SCRIPTED = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Restore every module's train or eval mode at the end of the block."""
    # each module by itself: ``train(mode)`` of the model would give all the same
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def is_scripted_batchnorm(module: nn.Module) -> bool:
    """Return whether a layer is BatchNorm in TorchScript.

    Its state has the layer's entries, and its forward pass is out of reach.
    """
    # TorchScript keeps the name of the class only.
    return (
        isinstance(module, torch.jit.ScriptModule)
        and getattr(module, "original_name", "") in _SCRIPTED
    )


def refuse_scripted(model: nn.Module, what: str) -> None:
    """Refuse a model with BatchNorm in TorchScript, on which ``what`` has no effect.

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
    # A model may have a ``train`` of its own that leaves layers in eval mode: ask it.
    with kept_modes(model):
        model.train()
        refused = [path for path, module in scripted.items() if module.training]
    if refused:
        kind = type(scripted[refused[0]]).__name__
        raise NormLayerError(
            f"{what}: BatchNorm layer {refused[0] or 'model'!r} is a {kind}, in which"
            " it would have no effect. Use the plain module."
        )

"""Passes over data that read the inputs of BatchNorm layers.

A pass goes through a copy of the model, so nothing is restored after it. A layer
normalises exactly its input only if its forward pass is torch's, so other layers are
refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.layer_calls import has_own_forward

__all__ = ["refuse_own_forward", "uncompiled", "watch_inputs"]


def refuse_own_forward(layers: Mapping[str, _BatchNorm]) -> None:
    """Raise NormLayerError for a layer whose forward pass is not torch's."""
    for path, layer in layers.items():
        if has_own_forward(layer):
            raise NormLayerError(
                f"BatchNorm layer '{path}' is a {type(layer).__name__} with its own"
                " forward pass, so it may normalise something else than its input. Use"
                " torch's layer, and a separate layer for anything else."
            )


def watch_inputs(
    layers: Mapping[str, _BatchNorm], note: Callable[[str, Tensor], None]
) -> list[RemovableHandle]:
    """Call ``note(path, x)`` before each call of a layer of a copied model.

    ``note`` runs before the call, because the layer may change its input in place.

    Raises:
        NormLayerError: a layer has its own forward pass.
    """
    refuse_own_forward(layers)

    def hook(
        path: str, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> None:
        with torch.no_grad():
            note(path, args[0] if args else kwargs["input"])

    handles = []
    for path, layer in layers.items():
        of_layer = functools.partial(hook, path)
        handles.append(layer.register_forward_pre_hook(of_layer, with_kwargs=True))
    return handles


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled modules as plain modules in the block.

    A compiled module ignores hooks that were added after its compilation.
    """
    # Without a compiled model in this process, the import would take seconds.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager

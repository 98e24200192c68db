"""Passes over data that read the inputs of BatchNorm layers.

A pass goes through a borrowed or a copied model, so nothing is restored after it. A layer
normalises exactly its input only if its forward pass is torch's, so other layers are
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.layer_calls import has_own_forward

__all__ = ["refuse_own_forward", "watch_inputs"]


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
    """Call ``note(path, x)`` before each call of a layer of a borrowed or copied model.

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

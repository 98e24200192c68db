"""Passes over data that read the inputs of BatchNorm layers.

A pass goes through a borrowed or a copied model, so nothing is restored after it. The
input of a layer is the tensor that it normalises, in its call of
``functional.batch_norm``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.training.batchnorm_calls import Arguments, forward_with
from fedbn_flwr.training.layer_calls import replace_attribute

__all__ = ["watch_inputs"]


def watch_inputs(
    layers: Mapping[str, _BatchNorm], note: Callable[[str, Tensor], None]
) -> list[Callable[[], None]]:
    """Call ``note(path, x)`` before each call of a layer of a borrowed or copied model.

    ``x`` is what the layer normalises. A layer that does not call
    ``functional.batch_norm`` raises NormLayerError in the pass.

    Returns:
        The functions that undo this.
    """

    def act(path: str, arguments: Arguments) -> None:
        with torch.no_grad():
            note(path, arguments.input)

    undo = []
    for path, layer in layers.items():
        of_layer = functools.partial(act, path)
        forward = functools.partial(forward_with, of_layer, layer.forward, layer, path)
        undo.append(replace_attribute(layer, "forward", forward))
    return undo

"""Batches of one example.

A BatchNorm layer may be unable to compute a variance from such a batch. Torch only.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import nn

from fedbn_flwr.errors import FedBNError, NormLayerError
from fedbn_flwr.training.batches import map_inputs
from fedbn_flwr.training.borrowed import SecondModel, borrowed
from fedbn_flwr.training.freezing import copy_modes, layers_of
from fedbn_flwr.training.model_state import unwrap
from fedbn_flwr.training.randomness import seeded

__all__ = ["raise_named", "takes_one_example"]


def raise_named(error: ValueError, model: nn.Module, batch_size: int) -> NoReturn:
    """Raise ``error``, with the name of the BatchNorm layer that raised it, if any.

    An example is the error for one value per channel.

    Raises:
        NormLayerError: replaces the error of a layer.
    """
    path = None if isinstance(error, FedBNError) else _raised_in(error, model)
    if path is not None:
        raise NormLayerError(
            f"BatchNorm layer '{path}' raised in a batch of {batch_size} examples:"
            f" {error}. If the layer normalises virtual batches (ghost BatchNorm), the"
            " last virtual batch has only one row. Choose batch-size and the numbers of"
            " examples so that no single row is left."
        ) from error
    raise error


def _raised_in(error: ValueError, model: nn.Module) -> str | None:
    """Return the path of the BatchNorm layer that raised the error, if any."""
    paths = {id(layer): path for path, layer in layers_of(model).items()}
    # The innermost frame of a layer's method wins, because layers may be nested.
    found, traceback = None, error.__traceback__
    while traceback is not None:
        found = paths.get(id(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    return found


def takes_one_example(
    model: nn.Module, inputs: Any, second: SecondModel | None = None
) -> bool:
    """Return whether a model accepts a batch of one example in its present modes.

    The pass is made in a second model, or else in the borrowed model.

    A BatchNorm layer that uses the statistics of the batch refuses one value per
    channel, so a pass decides.
    """
    plain = unwrap(model)
    # The model may change its inputs, and the training will report any other error.
    with (
        second() if second else borrowed(plain) as trial,
        suppress(Exception),
        seeded(0),
    ):
        copy_modes(plain, trial)
        try:
            with torch.no_grad():
                trial(map_inputs(copy.deepcopy, inputs))
        except ValueError:
            return False
    return True

"""Batches of one example.

A BatchNorm layer may be unable to compute a variance from such a batch. Torch only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import FedBNError, NormLayerError, StateError
from fedbn_flwr.training.batches import Batches, join_last, map_inputs
from fedbn_flwr.training.borrowed import Lend
from fedbn_flwr.training.freezing import copy_modes, layers_of
from fedbn_flwr.training.model_state import unwrap
from fedbn_flwr.training.randomness import seeded

__all__ = ["joined", "raise_named", "raised_in", "takes_one_example"]


def raise_named(error: ValueError, model: nn.Module, batch_size: int) -> NoReturn:
    """Raise ``error``, with the name of the BatchNorm layer that raised it, if any.

    An example is the error for one value per channel.

    Raises:
        NormLayerError: replaces the error of a layer.
    """
    path = None if isinstance(error, FedBNError) else raised_in(error, model)
    if path is not None:
        raise NormLayerError(
            f"BatchNorm layer '{path}' raised in a batch of {batch_size} examples:"
            f" {error}. If the layer normalises virtual batches (ghost BatchNorm), the"
            " last virtual batch has only one row. Choose batch-size and the numbers of"
            " examples so that no single row is left."
        ) from error
    raise error


def raised_in(error: ValueError, model: nn.Module) -> str | None:
    """Return the path of the BatchNorm layer that raised the error, if any."""
    paths = {id(layer): path for path, layer in layers_of(model).items()}
    # The innermost frame of a layer's method wins, because layers may be nested.
    found, traceback = None, error.__traceback__
    while traceback is not None:
        found = paths.get(id(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    return found


def takes_one_example(
    model: nn.Module, inputs: Any, targets: Any, second: Lend
) -> bool:
    """Return whether a model accepts a batch of one example in its present modes.

    The pass is made in the second model.

    A BatchNorm layer that uses the statistics of the batch refuses one value per
    channel, so a pass decides.
    """
    with second() as (trial, task), seeded(0), torch.no_grad():
        copy_modes(unwrap(model), trial)
        try:
            # The model may change its inputs.
            task.run(trial, *map_inputs(copy.deepcopy, (inputs, targets)))
        except StateError:  # the loss cannot be used twice
            raise
        except ValueError:
            return False
        except Exception:  # the training will report it
            return True
    return True


def joined(
    model: nn.Module,
    data: Batches,
    order: Sequence[Tensor],
    prepared: Callable[[Any], Any],
    second: Lend | None,
) -> Sequence[Tensor]:
    """Return the positions of each batch, for a pass of a model.

    If the last batch has one example, the second model is tried on this batch. If it
    refuses it, or is None, the last two batches are joined.
    """
    if not order or len(order[-1]) > 1:
        return order
    if second:
        inputs, targets = data.batch(order[-1])
        if takes_one_example(model, prepared(inputs), targets, second):
            return order
    return join_last(order)

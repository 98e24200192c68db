"""Batches of one example.

A BatchNorm layer may be unable to compute a variance from such a batch. Torch only.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import FedBNError, NormLayerError
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import copied
from fedbn_flwr.training.modes import restored_modes
from fedbn_flwr.training.randomness import seeded

__all__ = ["name_layer", "refusing_layers", "takes_one_example"]


def name_layer(error: ValueError, model: nn.Module, batch_size: int) -> None:
    """Name the BatchNorm layer that raised ``error``, if a layer raised it.

    An example is the error for one value per channel.

    Raises:
        NormLayerError: replaces the error.
    """
    path = None if isinstance(error, FedBNError) else _raised_in(error, model)
    if path is not None:
        raise NormLayerError(
            f"BatchNorm layer '{path}' raised in a batch of {batch_size} examples:"
            f" {error}. If the layer normalises virtual batches (ghost BatchNorm), the"
            " last virtual batch has only one row. Choose batch-size and the numbers of"
            " examples so that no single row is left."
        ) from error


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
    model: nn.Module, inputs: Any, hooks: Collection[ClientHook] = ()
) -> bool:
    """Return whether a model can be trained on a batch of one example.

    It can if each BatchNorm layer that uses the batch's statistics gets more than one
    value per channel, or if a hook accepts one value for the layer.
    """
    return not refusing_layers(model, inputs, hooks)


def refusing_layers(
    model: nn.Module, inputs: Any, hooks: Collection[ClientHook] = ()
) -> list[str]:
    """Return the paths of the BatchNorm layers that cannot use one example.

    The path "" means an unknown layer. The values per channel are counted in a forward
    pass, because late BN2d layers may get 1x1 maps. This pass is in eval mode and does
    not change the model.  For layers that are not called in eval mode, a
    forward pass of a copy in train mode decides.
    """
    model = copied(model)
    layers = {}
    for path, module in layers_of(model).items():
        uses_batch = module.training or module.running_mean is None
        if uses_batch:
            layers[path or "(the model itself)"] = module
    counts: dict[str, int] = {}

    def count(
        path: str, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> None:
        value = args[0] if args else kwargs["input"]
        # An input without rows needs no variance, so count it as enough values.
        values = value.numel() // value.shape[1] or 2
        counts[path] = min(counts.get(path, 2), values)

    handles = []
    for path, layer in layers.items():
        note = functools.partial(count, path)
        handles.append(layer.register_forward_pre_hook(note, with_kwargs=True))
    fails = False
    try:
        with restored_modes(model), seeded(0), torch.no_grad():
            model.eval()(inputs)
    except FedBNError:  # layers of this package raise their own errors
        raise
    except ValueError:  # torch raises this for a BatchNorm without running statistics
        fails = True
    finally:
        for handle in handles:
            handle.remove()
    if not fails:
        # Unseen layers are skipped in eval mode, or their forward pass calls no hooks.
        unseen = [path for path in layers if path not in counts]
        unseen_train = any(layers[path].training for path in unseen)
        if unseen_train:
            fails = _fails_in_train_mode(model, inputs)
    refusing = [path for path, values in counts.items() if values < 2]
    if fails and not refusing:
        return [""]
    return refusing


def _fails_in_train_mode(model: nn.Module, inputs: Any) -> bool:
    # the training will report any other error
    with suppress(Exception), seeded(0), torch.no_grad():
        try:
            copied(model)(inputs)
        except ValueError:
            return True
    return False

"""The memory format of a model's images: channels-last makes most convolutions faster.
It changes the last bits.

It does not change values, shapes or names: a state dict is the same in both formats.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from fedbn_flwr.training.copying import copied
from fedbn_flwr.training.inputs import inputs_for
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.wrappers import unwrap

__all__ = ["set_memory_format"]

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
# modules whose layers work in channels-last
_KNOWN = ("torch.nn.", "torchvision.", "fedbn_flwr.")
# models that are not tried again: of many clients, or in each message
_WORKING: set[tuple[str, str, str]] = set()


def set_memory_format(
    model: nn.Module, example: Callable[[], Any] | None = None
) -> nn.Module:
    """Give the model's 4-d entries the memory format that suits it, in place, and
    return the model.

    It is channels-last for models with 2-d convolutions in float32 or less and without
    instance norm, for which it is slow in torch; other models stay as they are. A model
    with layers of a user's own becomes contiguous if it works in that format only:
    ``x.view(-1, 400)`` needs each image in one piece. Only the model counts, so every
    engine and every node decides alike.

    Args:
        model: the model, on its device.
        example: returns inputs of two examples, on which a model with layers of a
            user's own is tried; it is called once for all equal models. None = such a
            model is not tried.
    """
    convolutions = [m for m in model.modules() if isinstance(m, _CONVOLUTIONS)]
    wide = any(m.weight.dtype == torch.float64 for m in convolutions)
    if not convolutions or wide or any(map(_normalises_each_channel, model.modules())):
        return model
    wanted = torch.channels_last
    if example is not None and _is_contiguous_only(unwrap(model), example):
        wanted = torch.contiguous_format
    return model.to(memory_format=wanted)  # type: ignore[call-overload,no-any-return,unused-ignore]


def _is_contiguous_only(model: nn.Module, example: Callable[[], Any]) -> bool:
    """Return whether a model works in the contiguous format and not in channels-last."""
    if all(type(module).__module__.startswith(_KNOWN) for module in model.modules()):
        return False
    # The text of a model has its layers with their sizes.
    kind = type(model).__module__, type(model).__qualname__, repr(model)
    if kind in _WORKING:
        return False
    # users' data may raise anything, and the training will raise it again
    with suppress(Exception), seeded(0):
        inputs = example()
        if not _fails(model, torch.channels_last, inputs):
            _WORKING.add(kind)
            return False
        return not _fails(model, torch.contiguous_format, inputs)
    return False


def _fails(model: nn.Module, memory_format: torch.memory_format, inputs: Any) -> bool:
    """Return whether a copy of the model raises in this format, in a step or in a test."""
    try:
        trial = copied(model)
    except Exception:  # it holds a lock, say, and is not tried
        return False
    trial.to(memory_format=memory_format)  # type: ignore[call-overload,unused-ignore]
    try:
        with torch.enable_grad():
            outputs = trial.train()(inputs_for(trial)(inputs))
            if isinstance(outputs, Tensor) and outputs.requires_grad:
                outputs.square().sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            trial.eval()(inputs_for(trial)(inputs))
    except Exception:
        return True
    return False


def _normalises_each_channel(module: nn.Module) -> bool:
    """Return whether the statistics are those of one channel of one example, as in
    instance norm.
    """
    if isinstance(module, nn.GroupNorm):
        return module.num_groups == module.num_channels
    return isinstance(module, _InstanceNorm)

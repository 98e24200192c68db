"""The memory format of a model's images: channels-last makes most convolutions faster. It changes the last bits.

It does not change values, shapes or names: a state dict is the same in both formats.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

__all__ = ["MemoryFormat", "inputs_for", "set_memory_format"]

MemoryFormat = Literal["auto", "contiguous", "channels-last"]
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def set_memory_format(model: nn.Module, memory_format: MemoryFormat = "auto") -> nn.Module:
    """Give the model's 4-d entries a memory format, in place, and return the model.

    "auto" is channels-last for models with 2-d convolutions in float32 or less and without instance norm, for which it
    is slow in torch, and leaves other models as they are. It looks at the model only, so every engine and every node
    decides alike.
    """
    if memory_format == "auto":
        convolutions = [m for m in model.modules() if isinstance(m, _CONVOLUTIONS)]
        wide = any(m.weight.dtype == torch.float64 for m in convolutions)
        if not convolutions or wide or any(map(_normalises_each_channel, model.modules())):
            return model
    chosen = torch.contiguous_format if memory_format == "contiguous" else torch.channels_last
    return model.to(memory_format=chosen)  # type: ignore[call-overload,no-any-return,unused-ignore]


def _normalises_each_channel(module: nn.Module) -> bool:
    """Return whether the statistics are those of one channel of one example, as in instance norm."""
    by_group = isinstance(module, nn.GroupNorm) and module.num_groups == module.num_channels
    return by_group or isinstance(module, _InstanceNorm)


def inputs_for(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function that brings a batch to the model's device, dtype and memory format."""
    floats = (buffer for buffer in model.buffers() if buffer.is_floating_point())
    like = next(itertools.chain(model.parameters(), floats, [torch.empty(0)]))  # BatchNorm alone may have no parameter
    images = [p for p in model.parameters() if p.dim() == 4]
    last = any(p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous() for p in images)
    memory_format = torch.channels_last if last else torch.contiguous_format

    def prepared(inputs: Tensor) -> Tensor:
        inputs = inputs.to(like.device, like.dtype if inputs.is_floating_point() else None, non_blocking=True)
        return inputs.contiguous(memory_format=memory_format) if inputs.dim() == 4 else inputs

    return prepared

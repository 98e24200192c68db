"""A model's output with other parameters and buffers than its own. Torch only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["call_with"]


def call_with(model: nn.Module, values: Mapping[str, Tensor], inputs: Tensor) -> Any:
    """Return ``model(inputs)`` with ``values`` in place of the entries that they name, and of entries tied to these.

    Where torch finds the tied entries by itself (``tie_weights``), it leaves a module that is registered at two paths
    with the given values after the call: an optimizer would no longer train it.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given = {own[name]: value for name, value in values.items()}
    entries = {}
    for path, module in model.named_modules():  # each module once
        for leaf, entry in (*module._parameters.items(), *module._buffers.items()):
            if entry in given:
                entries[f"{path}.{leaf}" if path else leaf] = given[entry]
    return functional_call(model, entries, (inputs,), tie_weights=False)

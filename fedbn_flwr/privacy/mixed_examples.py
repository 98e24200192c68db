"""Models whose output for an example depends on the others of its batch: DP-SGD refuses them. Torch only."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.privacy.called_with import call_with
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.scripted import is_scripted_batchnorm
from fedbn_flwr.training.wrappers import unwrap

__all__ = ["WAY_OUT", "check_layers", "mixes_examples", "try_two_examples"]

WAY_OUT = (
    "Use another norm (norm=group, layer or wsconv); or keep BatchNorm frozen from the first round, at statistics that "
    "no client's data have touched (strategy=fixbn with freeze-at=0, and init= for public weights), or in the part "
    "that train-only freezes"
)


def mixes_examples(model: nn.Module) -> list[str]:
    """Return the layers whose output for an example depends on others, in their present mode, one line each."""
    lines = []
    for path, layer in model.named_modules():
        kind, statistics = type(layer).__name__, getattr(layer, "running_mean", None)
        if (isinstance(layer, _BatchNorm) or is_scripted_batchnorm(layer)) and (layer.training or statistics is None):
            lines.append(f"{path} ({kind}) normalises an example with the others of its batch")
        if isinstance(layer, _InstanceNorm) and layer.training and statistics is not None:
            lines.append(f"{path} ({kind}) has running statistics, which keep what no noise protects")
    return [f"record-level privacy: {what}" for what in lines]


def check_layers(model: nn.Module) -> None:
    """Raise ConfigError for a wrapper or a complex parameter, NormLayerError for a layer that mixes examples."""
    if unwrap(model) is not model:
        raise ConfigError(
            f"record-level privacy computes the gradients of the module itself: {type(model).__name__} around it "
            "would have no effect. Pass the module inside."
        )
    if refused := [name for name, p in model.named_parameters() if p.requires_grad and p.is_complex()]:
        raise ConfigError(
            f"record-level privacy adds real noise, and parameter '{refused[0]}' is complex. Freeze it (train-only), "
            "or store its real and imaginary parts (torch.view_as_real)."
        )
    if mixing := mixes_examples(model):
        raise NormLayerError("\n".join(mixing) + f"\n{WAY_OUT}.")


def try_two_examples(model: nn.Module, two: Tensor) -> None:
    """Raise NormLayerError if the output for the first of two examples depends on the second, given the same masks."""
    outputs = []
    for pair in (two, two[[0, 0]]):
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        with torch.no_grad(), seeded(0):
            outputs.append(call_with(model, buffers, pair)[0].double())
    if (outputs[1] - outputs[0]).abs().max() > 1e-3 * outputs[0].abs().max():
        raise NormLayerError(
            "record-level privacy: the model's output for an example depends on the others of its batch, and DP-SGD "
            f"would train it with one example at a time.\n{WAY_OUT}."
        )

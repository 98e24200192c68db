"""The BatchNorm layers that track statistics in training."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.reestimation import tracking_layers
from fedbn_flwr.training.freezing import stays_in_eval
from fedbn_flwr.training.modes import restored_modes


def layers_in_training(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers that track statistics in training, by path.

    Layers that the model keeps in eval mode, or that are in eval mode while the model
    is in train mode, are left out. A layer at several paths is listed under the first.
    """
    in_eval = stays_in_eval(model)
    with restored_modes(model):
        model.train()
        layers = {*tracking_layers(model)} - in_eval
    return {path: module for path, module in model.named_modules() if module in layers}

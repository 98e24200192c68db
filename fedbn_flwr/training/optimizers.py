"""The optimizers of local training.

They are torch's SGD, Adam and AdamW. Our settings replace some of torch's defaults.

Their methods are called without torch's wrappers. The wrappers import the compiler in
order to exclude the methods from compiled code. The import takes longer than 100 steps
of a small model, and over a network every message starts a process.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from fedbn_flwr.training.settings import LocalTraining

__all__ = ["make_optimizer"]


class _Unwrapped(torch.optim.Optimizer):
    """An optimizer without torch's wrappers, except for the method ``step``."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    bare_step: Any
    """``step`` without wrappers and without the hooks of the optimizer."""


def _bare(kind: type[torch.optim.Optimizer]) -> Any:
    return torch.no_grad()(inspect.unwrap(kind.step))


class _SGD(_Unwrapped, torch.optim.SGD):
    bare_step = _bare(torch.optim.SGD)


class _Adam(_Unwrapped, torch.optim.Adam):
    bare_step = _bare(torch.optim.Adam)


class _AdamW(_Unwrapped, torch.optim.AdamW):
    # In torch 2.6, AdamW is not a subclass of Adam.
    bare_step = _bare(torch.optim.AdamW)


def make_optimizer(model: nn.Module, settings: LocalTraining) -> _Unwrapped:
    """Return a new optimizer over the trainable parameters.

    SGD and Adam add the weight decay to the gradient; AdamW shrinks the weights by
    learning rate times weight decay.

    Args:
        model: the model.
        settings: name of the optimizer, learning rate, weight decay, momentum.

    Raises:
        ValueError: of torch, the model has no trainable parameter.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    rate, decay = settings.learning_rate.initial, settings.weight_decay
    if settings.optimizer == "sgd":
        momentum = settings.sgd_momentum
        # On a CPU, torch's default is a loop over the parameters.
        return _SGD(
            parameters, rate, momentum=momentum, weight_decay=decay, foreach=True
        )
    kind = _Adam if settings.optimizer == "adam" else _AdamW
    return kind(parameters, rate, weight_decay=decay)
